"""Choosing who runs what."""

from torpor_scheduler.assignments import WRITE_DEADLINE_S, HostView, LeaseObservation, OperatorObject, choose

LEASE = LeaseObservation("t0", 15.0, seen_s=100.0)


def operator(name, host="", epoch=0, deleting=False):
    return OperatorObject(("ns", name), f"uid-{name}", "7", host, epoch, deleting)


def chosen(operators, hosts, leases=None, now_s=100.0):
    views = {name: HostView(name, running) for name, running in hosts.items()}
    return {(a.operator.key[1], a.host, a.epoch) for a in choose(operators, views, leases or {}, now_s)}


def test_an_unassigned_operator_goes_to_the_host_with_fewest():
    operators = [operator("a", "h1", 3), operator("b"), operator("c")]
    assert chosen(operators, {"h1": {("ns", "a"): 3}, "h2": {}}) == {("b", "h2", 1), ("c", "h1", 1)}


def test_nothing_is_written_where_host_and_object_agree():
    assert chosen([operator("a", "h1", 3)], {"h1": {("ns", "a"): 3}}) == set()


def test_a_host_that_came_back_gets_a_new_epoch():
    assert chosen([operator("a", "h1", 3)], {"h1": {}}) == {("a", "h1", 4)}


def test_a_host_that_is_away_keeps_its_operators_until_its_lease_and_the_longest_write_are_over():
    operators, hosts, leases = [operator("a", "gone", 3)], {"h1": {}}, {"gone": LEASE}
    assert chosen(operators, hosts, leases, now_s=100 + 15 + WRITE_DEADLINE_S - 0.1) == set()
    assert chosen(operators, hosts, leases, now_s=100 + 15 + WRITE_DEADLINE_S) == {("a", "h1", 4)}


def test_a_host_without_a_known_lease_keeps_its_operators():
    assert chosen([operator("a", "gone", 3)], {"h1": {}}) == set()


def test_without_hosts_nothing_is_assigned_and_deleted_operators_never_are():
    assert chosen([operator("a")], {}) == set()
    assert chosen([operator("a", deleting=True)], {"h1": {}}) == set()
