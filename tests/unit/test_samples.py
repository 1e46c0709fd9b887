"""Ranks hear the same step times, whatever their own clocks say."""

from dataclasses import replace

from sglang_adaptive_spec.clock import StepTime, StepTimes
from sglang_adaptive_spec.engine.samples import HAND_ON_EVERY_STEPS, SHARE_EVERY_STEPS, SampleRelay
from sglang_adaptive_spec.modes import Mode


def timed(seconds: float) -> StepTime:
    return StepTime(Mode.SPEC, 4, seconds, after=Mode.SPEC, number=1)


def times(*seconds: float) -> StepTimes:
    return StepTimes(Mode.SPEC, Mode.SPEC, 4, 0, list(seconds))


def test_a_single_rank_hears_every_few_steps_and_at_once_where_that_matters():
    heard = []
    relay = SampleRelay(1, lambda value: value, lambda kinds, verifies: heard.extend([*verifies, *kinds]))
    relay.timed(timed(0.5))
    relay.verified(3, 7)
    relay.at_step(HAND_ON_EVERY_STEPS - 1, at_once=False)
    assert heard == []
    relay.at_step(HAND_ON_EVERY_STEPS, at_once=False)
    assert heard == [(3, [7]), times(0.5)]
    relay.verified(2, 2)
    relay.at_step(HAND_ON_EVERY_STEPS + 1, at_once=True)
    relay.at_step(2 * HAND_ON_EVERY_STEPS, at_once=False)
    assert heard == [(3, [7]), times(0.5), (2, [2])]


def test_steps_that_are_alike_are_heard_of_together_and_in_order():
    heard = []
    relay = SampleRelay(1, lambda value: value, lambda kinds, verifies: heard.append((kinds, verifies)))
    for requests, tokens in ((3, 7), (3, 5), (2, 2), (3, 4)):
        relay.verified(requests, tokens)
    last = StepTime(Mode.SPEC, 4, 0.5, after=Mode.SPEC, number=1)
    others = (
        {"mode": Mode.PLAIN},
        {"after": Mode.PLAIN},
        {"requests": 5},
        {"context_tokens": 9},
    )
    for other in others:
        relay.timed(replace(last, seconds=0.25))
        relay.timed(last)
        relay.timed(replace(last, **other))
    relay.at_step(0, at_once=False)
    [(kinds, verifies)] = heard
    assert verifies == [(3, [7, 5]), (2, [2]), (3, [4])]
    assert kinds[0::2] == [times(0.25, 0.5)] * len(others)
    assert kinds[1::2] == [replace(times(0.5), **other) for other in others]


def test_what_was_forgotten_is_not_heard_of():
    heard = []
    relay = SampleRelay(1, lambda value: value, lambda kinds, verifies: heard.extend([*verifies, *kinds]))
    relay.timed(timed(0.5))
    relay.verified(3, 7)
    relay.clear()
    relay.at_step(0, at_once=False)
    assert heard == []


def test_several_ranks_hear_of_verify_results_as_soon_as_one():
    heard = []
    relay = SampleRelay(2, lambda value: value, lambda kinds, verifies: heard.extend([*verifies, *kinds]))
    relay.timed(timed(0.5))
    relay.verified(3, 7)
    relay.at_step(HAND_ON_EVERY_STEPS, at_once=False)
    assert heard == [(3, [7])]


def test_several_ranks_hear_rank_0_at_the_same_steps():
    heard: dict[int, list] = {0: [], 1: []}
    steps_heard: dict[int, list] = {0: [], 1: []}
    shared = []

    def from_rank_0(rank):
        def broadcast(value):
            if rank == 0:
                shared.append(value)
            return shared[-1]

        return broadcast

    relays = [SampleRelay(2, from_rank_0(rank), lambda kinds, _, r=rank: heard[r].extend(kinds)) for rank in range(2)]
    for step in range(3 * SHARE_EVERY_STEPS):
        for rank, relay in enumerate(relays):
            before = len(heard[rank])
            relay.at_step(step, at_once=False)
            if len(heard[rank]) > before:
                steps_heard[rank].append(step)
            relay.timed(timed(1.0 + step if rank == 0 else float("nan")))
    assert steps_heard[0] == steps_heard[1] == [SHARE_EVERY_STEPS, 2 * SHARE_EVERY_STEPS]
    assert heard[0] == heard[1]
    assert [s for each in heard[0] for s in each.seconds] == [1.0 + step for step in range(2 * SHARE_EVERY_STEPS)]


def test_ranks_fed_different_clocks_decide_alike():
    """The policy that measures, on two ranks, one of which has a clock that is nonsense."""
    from sglang_adaptive_spec.controller import Controller
    from sglang_adaptive_spec.costs import StepCosts
    from sglang_adaptive_spec.policies import AutoPolicy

    shared: list = []
    controllers = [Controller(AutoPolicy(StepCosts(), 2, max_accept_length=4)) for _ in range(2)]

    def from_rank_0(rank):
        return lambda value: shared.append(value) or value if rank == 0 else shared[-1]

    relays = [SampleRelay(2, from_rank_0(rank), c.learn) for rank, c in enumerate(controllers)]
    modes: list[list] = [[], []]
    for step in range(4000):
        requests = 4 if step // 800 % 2 == 0 else 48
        for rank, (controller, relay) in enumerate(zip(controllers, relays, strict=True)):
            relay.at_step(step, at_once=controller.policy.attentive)
            before = controller.mode
            mode = controller.decide(requests, lambda: 1, context_tokens=300).mode
            modes[rank].append(mode)
            if mode is Mode.SPEC:
                relay.verified(requests, 2 * requests)
            seconds = (
                (0.01 + 0.001 * requests if mode is Mode.SPEC else 0.01 + 0.0001 * requests) if rank == 0 else -1e9
            )
            relay.timed(StepTime(mode, requests, seconds, after=before, number=step, context_tokens=300))
    assert modes[0] == modes[1]
    # It is a decision, not a standstill.
    assert set(modes[0]) == {Mode.SPEC, Mode.PLAIN}
