#!/bin/bash
# Commands inside a host's container.
#
#   testbed-node prepare n0 n1 n2    create missing keys and folders of all hosts on the testbed's volume
#   testbed-node serve      start this host's services: sshd, Docker Engine, Slurm
#   testbed-node engine     start the Docker Engine and wait until it answers
#   testbed-node stop-engine
#   testbed-node answers    exit 0 if all services answer
#   testbed-node join | fast | empty | heal    undo a fault of testbed/fault.sh inside this host
#   testbed-node share FROM INTO ID LAYER...   hard-link a container image from one engine's folder into another
set -eu

ENGINE_TIMEOUT_S=90
DISKS=/disks  # the testbed's volume: keys, the shared folder, the engines' data

fail() { echo "$(hostname): $*" >&2; exit 1; }

prepare() {
    umask 077
    mkdir -p $DISKS/keys
    chmod 755 $DISKS
    [ -e $DISKS/keys/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C clusterctl-testbed -f $DISKS/keys/id_ed25519
    [ -e $DISKS/keys/munge.key ] || head -c 128 /dev/urandom >$DISKS/keys/munge.key
    for host in "$@"; do
        mkdir -p "$DISKS/$host"
        [ -e "$DISKS/keys/$host" ] || ssh-keygen -q -t ed25519 -N '' -C "$host" -f "$DISKS/keys/$host"
    done
    [ -d $DISKS/shared ] || install -d -m 1777 $DISKS/shared
}

# The volume is one file system, so that engines can hard-link layers. A host mounts only its own part.
own_disks() {
    mountpoint -q $DISKS || return 0
    install -m 600 $DISKS/keys/"$(hostname)" /etc/ssh/ssh_host_ed25519_key
    install -m 400 -o munge -g munge $DISKS/keys/munge.key /etc/munge/munge.key
    for home in /root:root /home/ada:ada; do
        install -d -m 700 -o "${home#*:}" -g "${home#*:}" "${home%:*}/.ssh"
        install -m 600 -o "${home#*:}" -g "${home#*:}" $DISKS/keys/id_ed25519.pub "${home%:*}/.ssh/authorized_keys"
    done
    mkdir -p /var/lib/docker
    mount --bind $DISKS/"$(hostname)" /var/lib/docker
    mount --bind $DISKS/shared /shared
    umount $DISKS
}

# cgroup v2 allows no process next to child groups, so processes move into a leaf. On v1, with the machine's groups
# mounted, the engine's containers are below this container's group, so that freeze and kill include them.
engine_cgroup() {
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        mkdir -p /sys/fs/cgroup/init
        while read -r pid; do echo "$pid" >/sys/fs/cgroup/init/cgroup.procs 2>/dev/null || true; done </sys/fs/cgroup/cgroup.procs
        sed 's/[^ ]*/+&/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
        echo /engine
    else
        echo "$(sed -n 's/^[0-9]*:freezer://p' /proc/1/cgroup)/engine"
    fi
}

engine_answers() { timeout 20 docker info >/dev/null 2>&1; }

engine() {
    if engine_answers; then return 0; fi
    rm -f /run/docker.pid /run/docker/containerd/containerd.pid
    group=$(engine_cgroup)
    # A child of init. $! instead of pidof: the new process may not have its name yet.
    pid=$(setsid dockerd --cgroup-parent "$group" >>/var/log/dockerd.log 2>&1 </dev/null & echo $!)
    until=$(($(date +%s) + ENGINE_TIMEOUT_S))
    until engine_answers; do
        reason=''
        kill -0 "$pid" 2>/dev/null || reason="exited at its start"
        [ "$(date +%s)" -lt "$until" ] || reason="does not answer after $ENGINE_TIMEOUT_S s"
        if [ -n "$reason" ]; then
            tail -n 15 /var/log/dockerd.log >&2
            fail "its Docker Engine $reason"
        fi
        sleep 0.1
    done
}

stop_engine() {
    pid=$(pidof dockerd) || return 0
    kill "$pid"
    for _ in $(seq 300); do
        if ! kill -0 "$pid" 2>/dev/null; then return 0; fi
        sleep 0.1
    done
    fail "its Docker Engine did not stop"
}

answers() {
    pidof sshd && engine_answers && scontrol ping && sinfo --noheader --nodes "$(hostname)" --states idle,alloc,mix | grep .
}

join() {
    while iptables -t mangle -D PREROUTING -i eth0 -j DROP 2>/dev/null; do :; done
    while iptables -t mangle -D POSTROUTING -o eth0 -j DROP 2>/dev/null; do :; done
}
fast() { tc qdisc del dev eth0 root 2>/dev/null || true; }
empty() { rm -f /data/filler; }
heal() { join && fast && empty && engine; }

serve() {
    own_disks
    chmod 666 /dev/fuse  # as udev would: Apptainer mounts images with it for ordinary users
    mkdir -p /run/sshd /run/munge
    chown munge:munge /run/munge
    setpriv --reuid munge --regid munge --init-groups munged
    if [ "$(hostname)" = n0 ]; then slurmctld; fi
    /usr/sbin/sshd
    engine
    slurmd
    exec sleep infinity
}

# Copy the container image with id $3 and layers $4... from the engine folder $1 to $2, whose engine is stopped.
# Layers are read-only, so their files are hard links; only folders are new.
share() {
    from=$1 into=$2 id=${3#sha256:} chain='' below='' name=''
    shift 3
    mkdir -p "$into"/overlay2/l "$into"/image/overlay2/{layerdb,imagedb/content}/sha256
    for layer in "$@"; do
        if [ -n "$chain" ]; then layer=sha256:$(printf 'sha256:%s %s' "$chain" "$layer" | sha256sum | cut -d ' ' -f 1); fi
        chain=${layer#sha256:}
        entry=image/overlay2/layerdb/sha256/$chain
        if [ ! -e "$into/$entry" ]; then
            name=$(cat "$from/$entry/cache-id")
            rm -rf "${into:?}/overlay2/$name" "$into/new"
            mkdir -m 710 "$into/overlay2/$name" "$into/overlay2/$name/work"
            cp -al "$from/overlay2/$name/diff" "$into/overlay2/$name/"
            cp "$from/overlay2/$name/link" "$into/overlay2/$name/"
            ln -sfn "../$name/diff" "$into/overlay2/l/$(cat "$from/overlay2/$name/link")"
            [ -z "$below" ] || printf %s "$below" >"$into/overlay2/$name/lower"
            touch "$into/overlay2/$name/committed"
            cp -a "$from/$entry" "$into/new"
            mv "$into/new" "$into/$entry"
        fi
        name=$into/overlay2/$(cat "$into/$entry/cache-id")
        below=l/$(cat "$name/link")$([ ! -e "$name/lower" ] || echo ":$(cat "$name/lower")")
    done
    cp "$from/image/overlay2/imagedb/content/sha256/$id" "$into/image/overlay2/imagedb/content/sha256/"
}

case ${1:-} in
    prepare | serve | answers | join | fast | empty | heal | engine | share) "$@" ;;
    stop-engine) stop_engine ;;
    *) fail "unknown: ${1:-nothing}" ;;
esac
