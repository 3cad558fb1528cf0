#!/bin/sh
# Print the Debian mirror of this machine's apt, or Debian's public mirror.
set -eu
# shellcheck disable=SC2016  # apt fills these in
mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(LABEL)' 2>/dev/null |
    sed -n 's|^\([^ ]*\) Debian Debian$|\1|p' | sort -u | tail -n 1) || true
echo "${mirror:-http://deb.debian.org/debian}"
