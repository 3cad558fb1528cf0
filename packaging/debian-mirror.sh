#!/bin/sh
# Prints the mirror that this machine's apt uses for Debian itself; Debian's public one if none can be read.
set -eu
# shellcheck disable=SC2016  # apt fills these in
mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(LABEL)' 2>/dev/null |
    sed -n 's|^\([^ ]*\) Debian Debian$|\1|p' | sort -u | tail -n 1) || true
echo "${mirror:-http://deb.debian.org/debian}"
