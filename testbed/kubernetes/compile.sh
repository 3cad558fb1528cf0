#!/bin/bash
# Build all programs of a cluster into /out. build.sh runs this in a container of a Debian image.
#
#   compile.sh VERSION OWNER    OWNER: user and group of the files, such as 1000:1000
set -euxo pipefail

VERSION=$1
OWNER=$2
RELEASE=bookworm  # Debian's last release with the source of the servers; later ones have only kubectl
COMMANDS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)
export DEBIAN_FRONTEND=noninteractive GOPATH=/build/go GOCACHE=/build/cache GO111MODULE=off CGO_ENABLED=0
SOURCE=$GOPATH/src/k8s.io/kubernetes

get_packages() {
    apt-get -qq update
    local signed='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]' type
    for type in deb deb-src; do echo "$type $signed $(debian-mirror) $RELEASE main"; done >"/etc/apt/sources.list.d/$RELEASE.list"
    printf 'Package: *\nPin: release n=%s\nPin-Priority: 100\n' "$RELEASE" >"/etc/apt/preferences.d/$RELEASE"
    apt-get -qq update
    apt-get -qq install --no-install-recommends dpkg-dev patch
    mkdir -p /build/packages /build/files "$(dirname "$SOURCE")"
    cd /build/packages
    local package packages=()
    for package in golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev \
        etcd-server containernetworking-plugins kubernetes-client; do packages+=("$package/$RELEASE"); done
    apt-get -qq download "${packages[@]}"
    for package in ./*.deb; do dpkg-deb -x "$package" /build/files; done
    # Go finds its own files by this path.
    ln -s /build/files/usr/lib/go-1.19 /usr/lib/go-1.19
    ln -s /build/files/usr/share/go-1.19 /usr/share/go-1.19
    export PATH=/usr/lib/go-1.19/bin:$PATH
    apt-get -qq source kubernetes/$RELEASE
    mv kubernetes-*/ "$SOURCE"
}

# Debian's source package lacks this file: "undefined: openapi.GetOpenAPIDefinitions".
generate_openapi() {
    go build -o /build/openapi-gen ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    local packages
    packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=' cmd pkg plugin staging/src/k8s.io |
        grep -Ev 'code-generator/|sample-apiserver/|_test\.go' | xargs -n 1 dirname |
        sed 's|^staging/src/k8s.io|vendor/k8s.io|; s|^|k8s.io/kubernetes/|' | LC_ALL=C sort -u | paste -sd ,)
    /build/openapi-gen --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r /build/violations
}

get_packages
cd "$SOURCE"
for patch in /from/patches/*.patch; do patch -p 1 <"$patch"; done
# The vendored reflect2 1.0.1 crashes the API server if built with Go 1.18 or newer; 1.0.2 does not.
rm -rf vendor/github.com/modern-go/reflect2
cp -r /build/files/usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/
generate_openapi

# `providerless` leaves out the clouds' code, half of each program.
variables=k8s.io/kubernetes/vendor/k8s.io/component-base/version
minor=${VERSION#*.}
go build -tags providerless -o /out/ -ldflags "-s -w -X $variables.gitVersion=v$VERSION \
    -X $variables.gitMajor=${VERSION%%.*} -X $variables.gitMinor=${minor%%.*}" "${COMMANDS[@]/#/./cmd/}"
go build -ldflags '-s -w' -o /out/pause /from/pause.go

cd /build/files/usr
cp bin/etcd bin/kubectl /out/
mkdir /out/cni
cp lib/cni/{bridge,host-local,loopback,portmap} /out/cni/
chown -R "$OWNER" /out
