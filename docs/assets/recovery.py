"""Print the lines of a launch's log that tell what happened, in colors and cut to what is legible on a phone."""

import re
import sys
from pathlib import Path

#: The first expression that matches a line gives its color; the group is what is shown.
SHOWN = [
    (r"(\d/\d nodes ready   world size \d)", "1"),
    (r"(epoch \d+/\d+  mAP50 \S+  mAP50-95 \S+)", "0"),
    (r"(node-\d: exit .*)", "1;31"),
    (r"(attempt \d on .*)", "33"),
    (r"(resuming in .*)", "33"),
    (r"(done in \d+ min \d+ s) .*?(   mAP50 \S+   mAP50-95 \S+)", "1;32"),
]

for line in Path(sys.argv[1]).read_text().splitlines():
    for pattern, color in SHOWN:
        if found := re.match(pattern, line):
            print(f"\033[{color}m{''.join(found.groups())}\033[0m")
            break
