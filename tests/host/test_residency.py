"""An operator's life as a pure step: every phase, and that no dirty key is ever stranded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torpor_host.operator_spec import Unload, UnloadPolicy
from torpor_host.residency import (
    COLD,
    HELD,
    BackoffEnded,
    Costs,
    Effect,
    Event,
    Hold,
    Keep,
    Loaded,
    Phase,
    Preload,
    Price,
    Release,
    Residency,
    TurnEnded,
    TurnFailed,
    UnloadAt,
    UnloadDue,
    UnloadEnded,
    WorkArrived,
    break_even_s,
    step,
    unload_time_s,
)

RESIDENT = Residency(Phase.RESIDENT)
RUNNING = Residency(Phase.RUNNING, turns=1)
UNLOADING = Residency(Phase.UNLOADING)
FAILED = Residency(Phase.FAILED)


def run(state: Residency, *events: Event, concurrency: int = 1) -> tuple[Residency, list[Effect]]:
    effects: list[Effect] = []
    for event in events:
        state, new = step(state, event, concurrency)
        effects += new
    return state, effects


def test_a_change_loads_runs_and_leaves_the_operator_resident() -> None:
    state, effects = run(COLD, WorkArrived(), Loaded(), TurnEnded(work_left=False, loaded=True))
    assert state == RESIDENT and effects == [Effect.START_TURN]


def test_an_idle_operator_is_unloaded_when_due() -> None:
    state, effects = run(RESIDENT, UnloadDue(), UnloadEnded(work_left=False, loaded=False))
    assert state == COLD and effects == [Effect.START_UNLOAD]


def test_a_running_operator_is_never_unloaded() -> None:
    assert run(RUNNING, UnloadDue()) == (RUNNING, [])


def test_a_key_that_came_as_the_turn_ended_starts_another_turn() -> None:
    state, effects = run(RUNNING, TurnEnded(work_left=True, loaded=True))
    assert state == RUNNING and effects == [Effect.START_TURN]


def test_work_turns_an_unload_round_after_the_snapshot() -> None:
    state, effects = run(UNLOADING, WorkArrived())
    assert effects == [Effect.TURN_ROUND]
    state, effects = run(state, UnloadEnded(work_left=True, loaded=True))
    assert (state.phase, effects) == (Phase.RUNNING, [Effect.START_TURN])


def test_work_that_came_too_late_to_turn_an_unload_round_loads_again() -> None:
    state, effects = run(UNLOADING, WorkArrived(), UnloadEnded(work_left=True, loaded=False))
    assert state.phase is Phase.LOADING and effects[-1] is Effect.START_TURN


def test_a_failed_operator_rests_and_then_takes_up_what_came_meanwhile() -> None:
    state, effects = run(COLD, WorkArrived(), TurnFailed())
    assert state.phase is Phase.FAILED and effects[-1] is Effect.REST
    state, effects = run(state, WorkArrived(), WorkArrived())
    assert state.phase is Phase.FAILED and effects == []
    state, effects = run(state, BackoffEnded(work_left=True))
    assert state.phase is Phase.LOADING and effects == [Effect.START_TURN]


def test_a_held_operator_drains_unloads_and_says_so() -> None:
    state, effects = run(RUNNING, Hold(), WorkArrived(), TurnEnded(work_left=True, loaded=True))
    assert state.phase is Phase.UNLOADING and effects == [Effect.START_UNLOAD]
    state, effects = run(state, UnloadEnded(work_left=True, loaded=False))
    assert state.phase is Phase.COLD and effects == [Effect.HELD]
    state, effects = run(state, Release(work_left=True))
    assert state.phase is Phase.LOADING and effects == [Effect.START_TURN]


def test_holding_during_an_unload_that_was_turned_round_unloads_again() -> None:
    state, effects = run(UNLOADING, WorkArrived(), Hold(), UnloadEnded(work_left=True, loaded=True))
    assert state.phase is Phase.UNLOADING and effects[-1] is Effect.START_UNLOAD


def test_preloading_works_only_from_cold() -> None:
    assert run(COLD, Preload())[1] == [Effect.START_TURN]
    assert run(RESIDENT, Preload()) == (RESIDENT, [])
    assert run(HELD, Preload()) == (HELD, [])


def test_turns_are_capped_by_the_operators_concurrency() -> None:
    state, effects = run(RUNNING, *[WorkArrived()] * 5, concurrency=3)
    assert state.turns == 3 and effects == [Effect.START_TURN] * 2


class World:
    """Plays the workers' part: whatever a step asks for is in flight until the test lets it end."""

    def __init__(self, concurrency: int) -> None:
        self.state, self.concurrency = HELD, concurrency
        self.dirty = 0
        self.turns = self.unloads = self.instances = 0
        self.resting = self.held_seen = False

    def do(self, event: Event) -> None:
        self.state, effects = step(self.state, event, self.concurrency)
        for effect in effects:
            match effect:
                case Effect.START_TURN:
                    assert not self.unloads, "a turn during an unload"
                    self.turns += 1
                case Effect.START_UNLOAD:
                    assert not self.turns and not self.unloads, "an unload while something runs"
                    self.unloads += 1
                case Effect.REST:
                    self.resting = True
                case Effect.HELD:
                    assert not self.turns and not self.unloads and not self.instances, "held, but not out of memory"
        assert self.state.turns == self.turns <= self.concurrency

    def act(self, action: str, choice: bool) -> None:
        match action:
            case "work":
                self.dirty += 1
                self.do(WorkArrived())
            case "preload":
                self.do(Preload())
            case "unload":
                self.do(UnloadDue())
            case "hold":
                self.do(Hold())
            case "release":
                self.do(Release(work_left=self.dirty > 0))
            case "load" if self.turns and self.instances < self.turns:
                self.instances += 1
                self.do(Loaded())
            case "end turn" if self.turns:
                self.turns -= 1
                if self.instances > self.turns or choice:
                    self.instances = max(self.instances, 1)
                    if not self.state.held:
                        self.dirty = self.dirty // 2 if choice else 0
                self.do(TurnEnded(work_left=self.dirty > 0, loaded=self.instances > 0))
            case "fail turn" if self.turns:
                self.turns -= 1
                self.instances = min(self.instances, self.turns)
                self.do(TurnFailed())
            case "end unload" if self.unloads:
                self.unloads -= 1
                if not choice:
                    self.instances = 0
                self.do(UnloadEnded(work_left=self.dirty > 0, loaded=self.instances > 0))
            case "rested" if self.resting:
                self.resting = False
                self.do(BackoffEnded(work_left=self.dirty > 0))


ACTIONS = ["work", "preload", "unload", "hold", "release", "load", "end turn", "fail turn", "end unload", "rested"]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.booleans()), max_size=60), st.integers(1, 3))
def test_in_whatever_order_things_happen_a_dirty_key_is_never_stranded(
    actions: list[tuple[str, bool]], concurrency: int
) -> None:
    world = World(concurrency)
    for action, choice in actions:
        world.act(action, choice)
        moving = world.turns or world.unloads or world.resting
        assert moving or not world.dirty or world.state.held, f"{world.state} strands {world.dirty} keys"
    world.do(Release(work_left=world.dirty > 0))
    for _ in range(10):
        for action in ("load", "end turn", "end unload", "rested"):
            world.act(action, False)
    assert not world.dirty and world.state.phase in {Phase.COLD, Phase.RESIDENT}


def test_never_idle_and_predictive_decide_differently() -> None:
    costs, price = Costs(0.001, 0.0005, 500_000), Price()
    never, idle = Unload(policy=UnloadPolicy.NEVER), Unload(policy=UnloadPolicy.IDLE, idle_after_s=5)
    assert unload_time_s(never, UnloadAt(1.0), costs, price, 10.0) is None
    assert unload_time_s(idle, Keep(), costs, price, 10.0) == 15.0
    assert unload_time_s(Unload(), Keep(), costs, price, 10.0) is None
    assert unload_time_s(Unload(), UnloadAt(12.0), costs, price, 10.0) == 12.0
    assert unload_time_s(Unload(), UnloadAt(0.0), costs, price, 10.0) == 10.0
    assert unload_time_s(Unload(), None, costs, price, 10.0) == pytest.approx(13.0)


def test_break_even_grows_with_the_cost_of_coming_back_and_shrinks_under_pressure() -> None:
    unload, price = Unload(), Price()
    cheap = break_even_s(Costs(0.001, 0.0003, 500_000), unload, price)
    slow = break_even_s(Costs(0.5, 0.0003, 500_000), unload, price)
    big = break_even_s(Costs(0.001, 0.0003, 50_000_000), unload, price)
    assert big < cheap < slow <= 600.0
    assert break_even_s(Costs(), unload, price) > 0
    full = price.under_pressure(950, 1000)
    assert break_even_s(Costs(0.001, 0.0003, 500_000), unload, full) < cheap / 10


def test_costs_follow_what_is_measured() -> None:
    costs = Costs().measured(load_s=0.004)
    assert costs.load_s == 0.004 and costs.unload_s == 0
    assert costs.measured(load_s=0.008).load_s == 0.005
