#!/bin/sh
# Run the tests, and install their requirements.
#
#   packaging/test.sh IMAGE          all tests except those on the testbed; builds the container image IMAGE
#   packaging/test.sh IMAGE real     the tests on the three hosts of the testbed
#   packaging/test.sh IMAGE kubernetes     the tests on Kubernetes on these hosts
#   packaging/test.sh IMAGE prepare        no tests: only what they need
#
# Without a Docker Engine, the tests that need one are listed but not run; with CI=true, that is a failure. ENGINE=no
# skips them.
set -eu

IMAGE=$1
HERE=$(dirname "$0")
# Limits OpenMP's spinning threads, as in trainer/__main__.py.
export GOMP_SPINCOUNT=3000
# Some machines turn bytecode off. The tests start clusterctl some thousand times, which would compile it each time.
unset PYTHONDONTWRITEBYTECODE
PYTEST=".venv/bin/python -m pytest"

# Stop if the disk is too small for the tests on the testbed: Apptainer's build has three copies of the container image.
check_disk() {
    folder=$(docker info --format '{{.DockerRootDir}}')
    free=$(($(df --output=avail "$folder" | tail -n 1) / 1048576))
    [ "$free" -ge "$1" ] || {
        echo "test: $folder has $free GiB free, and these tests need $1; docker system df shows what can be removed" >&2
        exit 1
    }
}

list_tests_not_run() {
    echo
    echo "NOT RUN, $1. These tests need a Docker Engine:"
    $PYTEST -m "$2" --collect-only -q | sed -n 's/^\(.*::.*\)/  \1/p'
    [ "${ENGINE:-yes}" = no ] || [ "${CI:-}" != true ]
}

# The launcher's unit tests run on another Python than .venv too, preferably 3.10, with the same packages.
install_another_python() {
    for python in python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python python3.13 "$HOME"/.pyenv/versions/3.13.*/bin/python \
        python3.12 python3.11; do
        version=$("$python" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $(.venv/bin/python --version) in "Python $version".*) continue ;; esac
        another_venv=.make/python$version
        cmp -s requirements/dev.txt "$another_venv/dev.txt" && return
        echo "test: installing the launcher into $another_venv"
        "$python" -m venv --clear "$another_venv"
        sed '/--hash/d; s/ \\$//' requirements/dev.txt >"$another_venv/constraints.txt"
        "$another_venv/bin/pip" install -qq --disable-pip-version-check --constraint "$another_venv/constraints.txt" \
            --config-settings editable_mode=compat --editable . pytest pytest-timeout pytest-xdist prometheus-client
        cp requirements/dev.txt "$another_venv/dev.txt"
        return
    done
    another_venv=
}
test_on_another_python() {
    if [ -z "$another_venv" ]; then
        echo "test: the launcher is tested on one version of Python: no other Python 3.10 to 3.13 with venv found"
        return
    fi
    echo "test: the launcher on $("$another_venv/bin/python" --version)"
    "$another_venv/bin/python" -m pytest -q -n 2 -p no:cacheprovider tests/unit tests/golden
}

# The tests start sshd on loopback addresses. Those that need Chromium, Prometheus or MLflow are skipped without it, but not in CI.
packages="openssh-server rsync"
[ "${CI:-}" != true ] || packages="$packages chromium prometheus"
# shellcheck disable=SC2086  # several words
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $packages >/dev/null 2>&1; then
    echo "test: installing $packages (apt-get)"
    apt-get -qq update || true
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends \
        $packages >/dev/null
fi

# MLflow's server and the trackers' clients, over the packages of .venv.
install_trackers() {
    [ ! -x .make/trackers/bin/trackio ] || return 0
    echo "test: installing mlflow, wandb and trackio into .make/trackers"
    .venv/bin/python -m venv .make/trackers
    .make/trackers/bin/pip install -qq --disable-pip-version-check mlflow==3.17.2 wandb==0.31.0 trackio==0.43.0
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -c "$packages" >"$(.make/trackers/bin/python -c "$packages")/venv.pth"
}
# The schemas of Kubernetes, with which the manifests are compared.
install_kubernetes_schemas() {
    [ ! -x .make/kubernetes/bin/kubernetes-validate ] || return 0
    echo "test: installing kubernetes-validate into .make/kubernetes"
    .venv/bin/python -m venv .make/kubernetes
    .make/kubernetes/bin/pip install -qq --disable-pip-version-check kubernetes-validate==1.37.0
}
# Ultralytics' package, in the two versions with which `trainer yolo` is tested, over the packages of .venv.
install_ultralytics() {
    for version in 8.3.253 8.4.190; do
        folder=.make/ultralytics-$version
        [ ! -x "$folder/bin/yolo" ] || continue
        echo "test: installing ultralytics $version into $folder"
        .venv/bin/python -m venv "$folder"
        packages='import sysconfig; print(sysconfig.get_path("purelib"))'
        .venv/bin/python -c "$packages" >"$("$folder/bin/python" -c "$packages")/venv.pth"
        # Not its dependency opencv-python, which needs libraries of a desktop: .venv has the headless variant.
        "$folder/bin/pip" install -qq --disable-pip-version-check --no-deps "ultralytics==$version" \
            ultralytics-platform==0.1.99 ultralytics-thop==2.2.3 nvidia-ml-py==13.615.71 polars==2.1.0 \
            polars-runtime-32==2.1.0 psutil==7.2.2
    done
}
if [ "${CI:-}" = true ] && { [ -z "${2:-}" ] || [ "$2" = prepare ]; }; then
    install_trackers
    install_ultralytics
    install_kubernetes_schemas
fi

missing=
if [ "${ENGINE:-yes}" = no ]; then
    missing="ENGINE=no"
elif ! "$HERE/engine.sh"; then
    missing="no Docker Engine (see above)"
else
    "$HERE/image.sh" "$IMAGE"
fi

if [ "${2:-}" = prepare ]; then
    install_another_python
elif [ -z "${2:-}" ]; then
    # Most contract tests wait for processes, and most unit tests compute: side by side they use the cores best.
    install_another_python
    chosen="not real and not kubernetes and not gpu${missing:+ and not engine}"
    mkdir -p .make
    echo "test: in the background, with its output at the end: tests/contract, tests/engine"
    $PYTEST -n 3 --dist worksteal -m "$chosen" --durations 10 tests/contract tests/engine >.make/contract.log 2>&1 &
    contract=$!
    trap 'kill "$contract"; exit 130' INT TERM  # a process in the background ignores Ctrl-C
    failed=
    $PYTEST -n 2 --dist worksteal -m "$chosen" --durations 10 tests/unit tests/golden || failed=yes
    test_on_another_python || failed=yes
    wait "$contract" || failed=yes
    cat .make/contract.log
    [ -z "$failed" ] || exit 1
    [ -z "$missing" ] || list_tests_not_run "$missing" engine
elif [ -n "$missing" ]; then
    list_tests_not_run "$missing" "$2"
else
    # CI removes a testbed that it started; outside CI it stays up for the next run.
    [ "${CI:-}" != true ] || [ -n "$(docker ps --all --quiet --filter label=clusterctl-testbed)" ] || trap testbed/down.sh EXIT
    [ "$2" != real ] || check_disk 25
    testbed/up.sh
    testbed/image.sh "$IMAGE"
    [ "$2" != kubernetes ] || testbed/kubernetes/up.sh
    $PYTEST -m "$2" --durations 10 "tests/$2"
fi
