#!/usr/bin/env python3
"""The cluster's DNS server: dns.py ADDRESS KUBECONFIG.

It answers with the IPv4 addresses of Services, and of pods with a hostname and subdomain, which it takes from the API:
SERVICE.NAMESPACE.svc.cluster.local and HOSTNAME.SERVICE.NAMESPACE.svc.cluster.local. Other names do not exist.
"""

import base64
import json
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.request
from pathlib import Path

ZONE = "svc.cluster.local"
RETRY_S = 1
TTL_S = 5
TIMEOUT_S = 20  # of a list; a watch waits for the next change
A_RECORD = 1
NO_SUCH_NAME = 3


class Api:
    """Lists and watches objects of the API server with the token of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self.server = cluster["server"]
        self.headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}
        self.context = ssl.create_default_context(cadata=authority)

    def get(self, path, timeout_s=None):
        """Return the open answer to a GET request."""
        request = urllib.request.Request(self.server + path, headers=self.headers)
        return urllib.request.urlopen(request, context=self.context, timeout=timeout_s)


class Names:
    """The names of one kind of object, kept up to date by a thread."""

    def __init__(self, api: Api, kind: str) -> None:
        self.api = api
        self.kind = kind
        self.names: dict[tuple[str, str], dict[str, list[str]]] = {}
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        """Keep the names up to date. After an error, list again."""
        while True:
            try:
                self.list_and_watch()
            except (OSError, ValueError) as error:
                print(f"dns: {self.kind}: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_S)

    def list_and_watch(self) -> None:
        """Take all names, then every change, until the API server ends the watch."""
        with self.api.get(f"/api/v1/{self.kind}", TIMEOUT_S) as answer:
            listing = json.load(answer)
        self.names = {key(item): names_of(item) for item in listing["items"]}
        version = listing["metadata"]["resourceVersion"]
        with self.api.get(f"/api/v1/{self.kind}?watch=1&resourceVersion={version}") as changes:
            for line in changes:
                change = json.loads(line)
                if change["type"] == "ERROR":  # the version is too old: list again
                    return
                if change["type"] == "DELETED":
                    self.names.pop(key(change["object"]), None)
                else:
                    self.names[key(change["object"])] = names_of(change["object"])

    def look_up(self, name: str) -> list[str]:
        """Return the addresses of a name, or an empty list."""
        return next((names[name] for names in list(self.names.values()) if name in names), [])


def key(item):
    """Return the namespace and name of an object."""
    return item["metadata"]["namespace"], item["metadata"]["name"]


def names_of(item) -> dict[str, list[str]]:
    """Return the addresses of each name of a Service or an Endpoints object."""
    namespace, name = key(item)
    service = f"{name}.{namespace}.{ZONE}"
    if "spec" in item:
        address = item["spec"].get("clusterIP")
        return {} if address in (None, "", "None") else {service: [address]}
    found: dict[str, list[str]] = {}
    for subset in item.get("subsets") or []:
        for address in subset.get("addresses") or []:
            found.setdefault(service, []).append(address["ip"])
            if "hostname" in address:
                found.setdefault(f"{address['hostname']}.{service}", []).append(address["ip"])
    return found


def answer(query: bytes, tables: list[Names]) -> bytes:
    """Return the reply to a query with one question (RFC 1035)."""
    at = 12
    labels = []
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace").lower())
        at += query[at] + 1
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    name = ".".join(labels)
    addresses = next(filter(None, (table.look_up(name) for table in tables)), [])
    found = addresses if kind == A_RECORD else []
    header = query[:2] + struct.pack(
        "!HHHHH", 0x8580 | (0 if addresses else NO_SUCH_NAME), 1, len(found), 0, 0
    )
    records = [
        b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, TTL_S, 4) + socket.inet_aton(address) for address in found
    ]
    return header + query[12 : at + 5] + b"".join(records)


def main() -> None:
    """Answer queries until killed."""
    address, kubeconfig = sys.argv[1:]
    api = Api(Path(kubeconfig))
    tables = [Names(api, "services"), Names(api, "endpoints")]
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    while True:
        query, client = server.recvfrom(4096)
        try:
            server.sendto(answer(query, tables), client)
        except (OSError, IndexError, struct.error) as error:
            print(f"dns: {client}: {error}", file=sys.stderr, flush=True)


main()
