"""Let a node have simulated GPUs: gpus.py KUBECONFIG NODE COUNT.

Kubernetes takes this number from the node's status; without a device plugin, nothing else sets it.
"""

import base64
import json
import ssl
import sys
import urllib.request
from pathlib import Path

TIMEOUT_S = 20

kubeconfig, node, count = sys.argv[1:]
config = json.loads(Path(kubeconfig).read_text())
cluster = config["clusters"][0]["cluster"]
patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": count}]
request = urllib.request.Request(
    f"{cluster['server']}/api/v1/nodes/{node}/status",
    json.dumps(patch).encode(),
    {
        "Authorization": f"Bearer {config['users'][0]['user']['token']}",
        "Content-Type": "application/json-patch+json",
    },
    method="PATCH",
)
authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
with urllib.request.urlopen(request, context=ssl.create_default_context(cadata=authority), timeout=TIMEOUT_S):
    pass
