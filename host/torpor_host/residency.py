"""Whether an operator is in memory: its life as a pure step, and when it is to be unloaded.

    cold ──load──▶ loading ──▶ resident ⇄ running
      ▲                           │ unload (snapshot, close)
      └────── unloading ◀─────────┘          failed ── back-off ──▶ cold

`step(state, event)` gives the next state and what is to be done. An event that arrives in any state only asks for
residency; the keys themselves stay in the work queue, so no state can drop one. Whoever ends something (a turn, an
unload, a back-off) says whether the queue still has work at that moment, which is what keeps a key from being stranded
between a worker that saw an empty queue and the event that came just after.

A *turn* is one worker that takes a loaded instance (or loads one) and drains the queue. *Held* is an operator that must
not run: not installed yet, being replaced, fenced. Unloading starts only with no turn in flight; work that arrives
meanwhile turns it round after the snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from torpor_services.price import FLOOR_S_PER_BYTE_S

from torpor_host.operator_spec import Unload, UnloadPolicy


class Phase(Enum):
    COLD = "Cold"
    LOADING = "Loading"
    RESIDENT = "Resident"
    RUNNING = "Running"
    UNLOADING = "Unloading"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Residency:
    """`turns`: workers in flight. `held`: none may start. `wanted`: work came while it could not be served."""

    phase: Phase = Phase.COLD
    turns: int = 0
    held: bool = False
    wanted: bool = False


COLD = Residency()
HELD = Residency(held=True)


# ---- events


@dataclass(frozen=True, slots=True)
class WorkArrived:
    """A key is dirty."""


@dataclass(frozen=True, slots=True)
class Preload:
    """Someone expects work: be resident."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The turn in flight has its instance."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A worker is done with it. `loaded`: an instance is left. `work_left`: now, in the queue."""

    work_left: bool
    loaded: bool


@dataclass(frozen=True, slots=True)
class TurnFailed:
    """The operator did not load, or failed again and again: it is to rest. Nothing of it is left in memory, unless
    another turn is in flight; that one then decides."""


@dataclass(frozen=True, slots=True)
class UnloadDue:
    """The policy, the scheduler, memory or a person wants it out."""


@dataclass(frozen=True, slots=True)
class UnloadEnded:
    """`loaded`: it was turned round and its instances are whole."""

    work_left: bool
    loaded: bool


@dataclass(frozen=True, slots=True)
class BackoffEnded:
    work_left: bool


@dataclass(frozen=True, slots=True)
class Hold:
    """No new turn, unload when the running ones have ended."""


@dataclass(frozen=True, slots=True)
class Release:
    """The hold is over."""

    work_left: bool


Event = (
    WorkArrived | Preload | Loaded | TurnEnded | TurnFailed | UnloadDue | UnloadEnded | BackoffEnded | Hold | Release
)


# ---- effects


class Effect(Enum):
    START_TURN = "a worker takes it, loads it if need be, and drains its queue"
    START_UNLOAD = "a worker snapshots and closes its instances"
    TURN_ROUND = "the unload in flight stops after the snapshot, if it still can"
    REST = "a back-off begins; its end is reported as BackoffEnded"
    HELD = "nothing of it is in memory and nothing will be until Release"


Step = tuple[Residency, tuple[Effect, ...]]


def step(state: Residency, event: Event, concurrency: int = 1) -> Step:
    """What follows. Events that mean nothing in a state (an old timer, a late answer) change nothing."""
    match event:
        case WorkArrived():
            return _work_arrived(state, concurrency)
        case Preload():
            if state.phase is Phase.COLD and not state.held:
                return _start_turn(state, Phase.LOADING)
            return state, ()
        case Loaded():
            return (_with(state, phase=Phase.RUNNING) if state.phase is Phase.LOADING else state), ()
        case TurnEnded():
            return _turn_ended(state, event)
        case TurnFailed():
            return _turn_failed(state)
        case UnloadDue():
            return _start_unload(state) if state.phase is Phase.RESIDENT else (state, ())
        case UnloadEnded():
            return _unload_ended(state, event)
        case BackoffEnded():
            if state.phase is not Phase.FAILED:
                return state, ()
            return _settle(_with(state, phase=Phase.COLD), event.work_left, loaded=False)
        case Hold():
            return _hold(state)
        case Release():
            if not state.held:
                return state, ()
            return _released(_with(state, held=False), event.work_left)
        case _:
            assert_never(event)


def _with(
    state: Residency,
    *,
    phase: Phase | None = None,
    turns: int | None = None,
    held: bool | None = None,
    wanted: bool | None = None,
) -> Residency:
    """`dataclasses.replace`, at a third of its price: five a wake."""
    return Residency(
        state.phase if phase is None else phase,
        state.turns if turns is None else turns,
        state.held if held is None else held,
        state.wanted if wanted is None else wanted,
    )


def _work_arrived(state: Residency, concurrency: int) -> Step:
    if state.held:
        return _with(state, wanted=True), ()
    match state.phase:
        case Phase.COLD:
            return _start_turn(state, Phase.LOADING)
        case Phase.RESIDENT:
            return _start_turn(state, Phase.RUNNING)
        case Phase.RUNNING if state.turns < concurrency:
            return _start_turn(state, Phase.RUNNING)
        case Phase.UNLOADING:
            return _with(state, wanted=True), (Effect.TURN_ROUND,)
        case Phase.LOADING | Phase.RUNNING:
            return state, ()  # the turn in flight drains the queue, and asks again when it ends
        case Phase.FAILED:
            return _with(state, wanted=True), ()
        case _:
            assert_never(state.phase)


def _turn_ended(state: Residency, event: TurnEnded) -> Step:
    return _settle(_with(state, turns=state.turns - 1), event.work_left, event.loaded)


def _turn_failed(state: Residency) -> Step:
    state = _with(state, turns=state.turns - 1)
    if state.turns:
        return state, ()
    if state.held:
        return _with(state, phase=Phase.COLD), (Effect.HELD,)
    return _with(state, phase=Phase.FAILED), (Effect.REST,)


def _unload_ended(state: Residency, event: UnloadEnded) -> Step:
    if state.phase is not Phase.UNLOADING:
        return state, ()
    if state.held and event.loaded:
        return state, (Effect.START_UNLOAD,)
    return _settle(state, event.work_left or state.wanted, event.loaded)


def _settle(state: Residency, work_left: bool, loaded: bool) -> Step:
    """Something ended: the next turn, rest in memory, or none of it."""
    if work_left and not state.held:
        return _start_turn(state, Phase.RUNNING if loaded or state.turns else Phase.LOADING)
    if state.turns:
        return state, ()
    if loaded:
        state = _with(state, phase=Phase.RESIDENT)
        return _start_unload(state) if state.held else (state, ())
    state = _with(state, phase=Phase.COLD)
    return state, ((Effect.HELD,) if state.held else ())


def _hold(state: Residency) -> Step:
    if state.held:
        return state, ()
    state = _with(state, held=True)
    match state.phase:
        case Phase.COLD | Phase.FAILED:
            return _with(state, phase=Phase.COLD), (Effect.HELD,)
        case Phase.RESIDENT:
            return _start_unload(state)
        case Phase.LOADING | Phase.RUNNING | Phase.UNLOADING:
            return state, ()
        case _:
            assert_never(state.phase)


def _released(state: Residency, work_left: bool) -> Step:
    work_left = work_left or state.wanted
    match state.phase:
        case Phase.COLD | Phase.RESIDENT:
            return _settle(state, work_left, loaded=state.phase is Phase.RESIDENT)
        case Phase.UNLOADING if work_left:
            return _with(state, wanted=True), (Effect.TURN_ROUND,)
        case _:
            return state, ()


def _start_turn(state: Residency, phase: Phase) -> Step:
    return _with(state, phase=phase, turns=state.turns + 1, wanted=False), (Effect.START_TURN,)


def _start_unload(state: Residency) -> Step:
    return _with(state, phase=Phase.UNLOADING, wanted=False), (Effect.START_UNLOAD,)


# ---- when to unload


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one operator, measured; moving averages. 0: not measured yet."""

    load_s: float = 0.0
    unload_s: float = 0.0
    resident_bytes: int = 0

    def measured(self, *, load_s: float = 0.0, unload_s: float = 0.0, resident_bytes: int = 0) -> Costs:
        """With a new measurement of what is given, weighing a quarter."""
        return Costs(
            _average(self.load_s, load_s),
            _average(self.unload_s, unload_s),
            round(_average(self.resident_bytes, resident_bytes)),
        )


def _average(old: float, new: float) -> float:
    if not new:
        return old
    return new if not old else old + (new - old) / 4


@dataclass(frozen=True, slots=True)
class Price:
    """What memory is worth to this host.

    `rent_s_per_byte_s`: holding a byte for a second costs as much as this many seconds of work; the scheduler's floor.
    `late_penalty`: a wake beyond the latency budget counts this many times its length (W : R : P = 1 : 1 : 8).
    """

    rent_s_per_byte_s: float = FLOOR_S_PER_BYTE_S
    late_penalty: float = 8.0

    def under_pressure(self, used_bytes: int, budget_bytes: int) -> Price:
        """The rent rises as the budget fills: twice at half, ten times at nine tenths."""
        if budget_bytes <= 0:
            return self
        free = max(0.01, 1.0 - used_bytes / budget_bytes)
        return replace(self, rent_s_per_byte_s=self.rent_s_per_byte_s / free)


BREAK_EVEN_S_MAX = 600.0
_UNMEASURED = Costs(load_s=0.005, unload_s=0.001, resident_bytes=1 << 20)


def break_even_s(costs: Costs, unload: Unload, price: Price) -> float:
    """Ski rental: unload once the rent has cost as much as coming back, `τ = B_off / r`.

    Never worse than twice the best plan without preloading, whatever comes (`scheduling.md`).
    """
    load_s = costs.load_s or _UNMEASURED.load_s
    unload_s = costs.unload_s or _UNMEASURED.unload_s
    resident_bytes = costs.resident_bytes or _UNMEASURED.resident_bytes
    late_s = price.late_penalty * load_s if load_s > unload.latency_budget_s else 0.0
    return min((unload_s + load_s + late_s) / (price.rent_s_per_byte_s * resident_bytes), BREAK_EVEN_S_MAX)


@dataclass(frozen=True, slots=True)
class UnloadAt:
    """The scheduler's: unload at `at_s` (monotonic) if nothing happens until then."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Keep:
    """The scheduler's: stay until the next directive."""


Advice = UnloadAt | Keep


def unload_time_s(
    unload: Unload, advice: Advice | None, costs: Costs, price: Price, idle_since_s: float
) -> float | None:
    """When an operator that is idle since then leaves memory, on the monotonic clock; None: it stays.

    `advice` is what the scheduler said after the operator's last event, None if it said nothing or is away.
    """
    match unload.policy:
        case UnloadPolicy.NEVER:
            return None
        case UnloadPolicy.IDLE:
            return idle_since_s + unload.idle_after_s
        case UnloadPolicy.PREDICTIVE:
            match advice:
                case UnloadAt(at_s):
                    return max(at_s, idle_since_s)
                case Keep():
                    return None
                case None:
                    return idle_since_s + break_even_s(costs, unload, price)
                case _:
                    assert_never(advice)
        case _:
            assert_never(unload.policy)
