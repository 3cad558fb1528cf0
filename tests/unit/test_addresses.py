import pytest

from cluster.errors import ClusterError
from cluster.spec import addresses
from cluster.spec.addresses import Address, Route

DOCKER0 = Address("172.17.0.1", "docker0")
DIRECT = Route("eth0")


def lan(last, device="eth0", speed=0):
    return Address(f"10.0.0.{last}", device, speed)


def chosen(found, routes=None, logins=None):
    """By default every node has a direct route to every address of the others."""
    numbers = {name: [each.number for each in mine] for name, mine in found.items()}
    every = {
        name: {number: DIRECT for other, theirs in numbers.items() if other != name for number in theirs}
        for name in found
    }
    for name, own in (routes or {}).items():
        every[name].update(own)
    return addresses.choose(found, every, logins or {})


def test_permanent_global_addresses_are_read_with_their_device_and_speed():
    text = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: docker0    inet 172.31.0.1/24 brd 172.31.0.255 scope global docker0\\       valid_lft forever preferred_lft forever
969: eth0    inet 172.30.0.10/24 brd 172.30.0.255 scope global eth0\\       valid_lft forever preferred_lft forever
969: eth0    inet6 fe80::42:acff:fe1e:a/64 scope link \\       valid_lft forever preferred_lft forever
969: eth0    inet6 2001:db8::5/64 scope global dynamic mngtmpaddr \\       valid_lft 1s preferred_lft 1s
969: eth0    inet6 2001:db8::6/64 scope global temporary dynamic \\       valid_lft 1s preferred_lft 1s
5: tun0    inet 10.8.0.6 peer 10.8.0.5/32 scope global tun0\\       valid_lft forever preferred_lft forever
"""
    assert addresses.addresses(text, {"eth0": 10000, "docker0": -1}) == (
        Address("172.31.0.1", "docker0", 0),
        Address("172.30.0.10", "eth0", 10000),
        Address("2001:db8::5", "eth0", 10000),
        Address("10.8.0.6", "tun0", 0),
    )


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("172.30.0.11 dev eth0 src 172.30.0.10 uid 0 \\    cache ", Route("eth0")),
        ("8.8.8.8 via 172.30.0.1 dev eth0 src 172.30.0.10 uid 0 \\    cache ", Route("eth0", "172.30.0.1")),
        (
            "local 172.17.0.1 dev lo src 172.17.0.1 uid 0 \\    cache <local> ",
            Route("lo", problem="it has the same address"),
        ),
        (
            "172.17.0.9 dev docker0 src 172.17.0.1 uid 0",
            Route("docker0", problem="its route leads into docker0"),
        ),
        ("RTNETLINK answers: Network is unreachable\n", Route(problem="network is unreachable")),
        ("", Route(problem="no answer")),
    ],
)
def test_the_output_of_ip_route_is_a_device_and_a_gateway_or_a_problem(text, route):
    assert addresses.route(text) == route


def test_docker0_is_never_chosen():
    assert chosen({"a": [DOCKER0, lan(5)], "b": [DOCKER0, lan(6)]})["a"] == lan(5)


def test_an_address_that_one_peer_cannot_reach_is_skipped():
    found = {"a": [lan(5), Address("192.168.1.5", "eth1")], "b": [lan(6)], "c": [lan(7)]}
    made = chosen(found, {"c": {"10.0.0.5": Route(problem="network is unreachable")}})
    assert made["a"].number == "192.168.1.5"


def test_a_direct_route_is_preferred_then_the_speed_then_the_logins_address():
    found = {"a": [lan(5), Address("192.168.1.5", "eth1")], "b": [lan(6)]}
    assert chosen(found, {"b": {"10.0.0.5": Route("eth0", "10.0.0.1")}})["a"].device == "eth1"
    fast = {"a": [lan(5, speed=1000), Address("192.168.1.5", "ib0", 100000)], "b": [lan(6)]}
    assert chosen(fast)["a"].device == "ib0"
    assert chosen(found, logins={"a": "192.168.1.5"})["a"].device == "eth1"


def test_an_overlay_is_chosen_only_without_another_address_and_with_a_warning():
    overlay = Address("100.64.0.5", "tailscale0")
    both = chosen({"a": [overlay, lan(5)], "b": [lan(6)]}, {"b": {"10.0.0.5": Route("eth0", "10.0.0.1")}})
    assert both["a"] == lan(5)
    assert not addresses.warnings(both["a"])
    alone = chosen({"a": [overlay], "b": [lan(6)]}, {"b": {"100.64.0.5": Route("tailscale0")}})
    assert alone["a"] == overlay
    assert "tailscale0, an overlay network: training will be slow" in addresses.warnings(alone["a"])[0]


def test_ipv6_is_chosen_only_without_ipv4():
    six = Address("2001:db8::5", "eth0", 100000)
    assert chosen({"a": [six, lan(5)], "b": [lan(6)]})["a"] == lan(5)
    assert chosen({"a": [six], "b": [lan(6)]})["a"] == six


def test_two_names_of_one_machine_and_machines_without_a_common_network_are_errors():
    with pytest.raises(ClusterError, match=r"b: it has the same address as a \(10\.0\.0\.5\)"):
        chosen({"a": [DOCKER0, lan(5)], "b": [DOCKER0, lan(5)]})
    with pytest.raises(ClusterError) as caught:
        chosen(
            {"a": [lan(5)], "b": [lan(6)], "c": []},
            {"b": {"10.0.0.5": Route(problem="network is unreachable")}},
        )
    assert caught.value.message.splitlines()[0] == (
        "a: the other nodes can reach none of its addresses: "
        "10.0.0.5 on eth0 cannot be reached from b (network is unreachable)"
    )
    assert "c: the other nodes can reach none of its addresses: it has none" in caught.value.message


def test_a_single_node_has_the_logins_address_or_loopback():
    assert chosen({"a": [lan(4), lan(5)]}, logins={"a": "10.0.0.5"})["a"] == lan(5)
    assert chosen({"a": [DOCKER0]})["a"].number == "127.0.0.1"
