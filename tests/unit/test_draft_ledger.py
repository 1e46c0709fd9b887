"""Which positions wait for the draft, and when it has to catch up."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_adaptive_spec.engine.draft_ledger import DraftLedger
from sglang_adaptive_spec.engine.hidden_ring import HiddenRing

CHUNK, CONTEXT = 4, 100


def ledger() -> DraftLedger:
    return DraftLedger(rows=8, chunk_tokens=CHUNK, context_tokens=CONTEXT)


def at(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def catch_up(account: DraftLedger, row: int, length: int) -> None:
    """The draft sees all that waits in a row."""
    due = account.due(at(row), at(length))
    account.saw(at(row), due, due[1])


def test_a_row_is_full_with_a_chunk_of_positions():
    account = ledger()
    assert [account.note(at(3), at(10 + k)) for k in range(CHUNK)] == [False, False, False, True]


def test_a_request_that_came_later_is_covered_by_the_same_catch_up():
    account = ledger()
    account.note(at(1), at(10))
    account.prefilled(at(2))
    account.note(at(1, 2), at(11, 50))
    starts, counts = account.due(at(1, 2), at(12, 51))
    assert (starts.tolist(), counts.tolist()) == ([10, 50], [2, 1])


def test_every_row_is_full_a_chunk_after_it_came_whatever_the_others_do():
    account = ledger()
    full = [account.note(at(1), at(10 + k)) for k in range(2)]
    account.prefilled(at(2))
    for k in range(2, CHUNK + 2):
        rows, ends = at(1, 2), at(11 + k, 49 + k)
        full.append(account.note(rows, ends - 1))
        if full[-1]:
            due = account.due(rows, ends)
            assert CHUNK in due[1].tolist()
            account.saw(rows, due, torch.where(due[1] == CHUNK, due[1], 0))
    assert full == [k in (CHUNK - 1, CHUNK + 1) for k in range(CHUNK + 2)]


def test_a_verify_step_in_between_does_not_hide_a_row_without_room():
    account = ledger()
    account.note(at(1), at(CONTEXT - CHUNK + 1))
    assert not account.waits(at(1))
    account.prefilled(at(2))
    assert [account.note(at(1, 2), at(CONTEXT - 1 + k, 10 + k)) for k in range(CHUNK)] == [False] * (CHUNK - 1) + [True]


def test_what_was_seen_waits_no_more():
    account = ledger()
    account.note(at(1, 2), at(10, 20))
    catch_up(account, 1, 11)
    assert not account.waits(at(1))
    assert account.waits(at(1, 2))
    assert account.due(at(1, 2), at(11, 21))[1].tolist() == [0, 1]


def test_a_leaving_request_keeps_its_positions_before_the_first_that_waits():
    account = ledger()
    account.note(at(1), at(10))
    assert account.true_length(1, 12) == 10
    assert account.true_length(2, 12) == 12


def test_behind_a_gap_nothing_is_true_however_much_is_seen_later():
    account = ledger()
    account.note(at(1), at(10))
    account.give_up(at(1, 2))
    assert not account.waits(at(1))
    account.note(at(1), at(14))
    catch_up(account, 1, 20)
    assert account.true_length(1, 20) == 10
    # Nothing waited in this row, so it has no gap.
    assert account.true_length(2, 20) == 20


def test_the_first_of_two_gaps_counts():
    account = ledger()
    for position in (10, 30):
        account.note(at(1), at(position))
        account.give_up(at(1))
    assert account.true_length(1, 40) == 10


def test_a_prefill_closes_a_gap():
    account = ledger()
    account.note(at(1), at(10))
    account.give_up(at(1))
    account.prefilled(at(1))
    assert account.true_length(1, 40) == 40


def test_a_step_taken_back_waits_for_nothing_and_keeps_what_waited_before():
    account = ledger()
    account.note(at(1), at(10))
    account.prefilled(at(2))
    account.note(at(1, 2), at(11, 50))
    account.forget_from(at(1, 2), at(11, 50))
    starts, counts = account.due(at(1, 2), at(11, 50))
    assert counts.tolist() == [1, 0]
    assert starts[0] == 10


def test_close_to_the_context_limit_there_is_no_room_to_catch_up():
    account = ledger()
    due = [account.note(at(1), at(CONTEXT - CHUNK + 1 + k)) for k in range(CHUNK - 1)]
    starts, counts = account.due(at(1), at(CONTEXT))
    assert not any(due)
    assert not account.waits(at(1))
    assert counts.tolist() == [0]
    assert starts.item() + CHUNK <= CONTEXT
    assert account.true_length(1, CONTEXT) == CONTEXT - CHUNK + 1


@given(st.lists(st.sampled_from(["step", "catch up", "leave"]), max_size=60))
def test_what_waits_never_exceeds_the_ring(events):
    account, length = ledger(), 10
    for event in events:
        if event == "leave":
            account.prefilled(at(1))
            length = 10
        elif event == "step" and length < CONTEXT - 2 * CHUNK:
            full = account.note(at(1), at(length))
            length += 1
            _, counts = account.due(at(1), at(length))
            assert counts.item() <= CHUNK
            assert full == (counts.item() == CHUNK)
            if full:
                catch_up(account, 1, length)
        elif event == "catch up":
            catch_up(account, 1, length)


def test_the_ring_gives_back_a_chunk_across_its_edge():
    ring = HiddenRing(rows=3, chunk_tokens=CHUNK, hidden_size=2, dtype=torch.float32, device="cpu")
    rows = at(1, 2)
    for k in range(CHUNK):
        positions = at(6 + k, 9 + k)
        hidden = positions.unsqueeze(1).float().expand(2, 2)
        ring.store(rows, positions, hidden, next_tokens=positions + 100)
    hidden, tokens = ring.read(rows, ring.span(at(6, 9), CHUNK))
    assert hidden[:, 0].tolist() == [6, 7, 8, 9, 9, 10, 11, 12]
    assert tokens.tolist() == [106, 107, 108, 109, 109, 110, 111, 112]


def test_the_ring_keeps_the_end_of_each_prompt_of_a_prefill():
    ring = HiddenRing(rows=3, chunk_tokens=CHUNK, hidden_size=2, dtype=torch.float32, device="cpu")
    # Of another type than the ring's, as where the draft is of another than its target.
    states = torch.arange(5.0, dtype=torch.float64).unsqueeze(1).expand(5, 2)
    # Prompts of 3 and 2 tokens, the second one behind a prefix of 7.
    ring.store_prompt_ends([2, 0], [2, 8], [2, 4], states, torch.tensor([70, 71], dtype=torch.int32))
    hidden, tokens = ring.read(at(2, 0, 1), ring.span(at(2, 8, 0), 1))
    assert hidden.tolist() == [[2, 2], [4, 4], [0, 0]]
    assert tokens.tolist() == [70, 71, 0]


def test_states_of_another_type_are_kept_in_the_drafts():
    ring = HiddenRing(rows=2, chunk_tokens=CHUNK, hidden_size=2, dtype=torch.bfloat16, device="cpu")
    ring.store(at(1), at(5), torch.ones((1, 2), dtype=torch.float16), at(70))
    hidden, _ = ring.read(at(1), ring.span(at(5), 1))
    assert hidden.tolist() == [[1, 1]]
    assert hidden.dtype == torch.bfloat16


def test_what_was_never_stored_is_finite():
    ring = HiddenRing(rows=2, chunk_tokens=CHUNK, hidden_size=2, dtype=torch.float32, device="cpu")
    hidden, tokens = ring.read(at(1), ring.span(at(5), CHUNK))
    assert torch.isfinite(hidden).all()
    assert (tokens == 0).all()
    assert ring.inside(at(0, 2), CHUNK).tolist() == [[False] * 4, [True, True, False, False]]


def test_of_what_was_seen_in_part_the_rest_waits_on():
    account = ledger()
    for k in range(3):
        account.note(at(1), at(10 + k))
    account.prefilled(at(2))
    account.note(at(2), at(20))
    rows, lengths = at(1, 2, 3), at(13, 21, 40)
    due = account.due(rows, lengths)
    account.saw(rows, due, at(2, 0, 0))
    assert [part.tolist() for part in account.due(rows, lengths)] == [[12, 20, 40], [1, 1, 0]]
    account.saw(rows, account.due(rows, lengths), at(1, 1, 0))
    assert not account.waits(rows)


def test_a_prompt_prefilled_plainly_is_true_to_its_end_though_its_last_position_waits():
    """SGLang's radix cache holds it already when the request leaves: less than that can't be given back."""
    account = ledger()
    account.prefilled_plainly(at(1, 2), at(29, -1))
    assert account.may_wait
    assert [account.true_length(row, 31) for row in (1, 2)] == [30, 31]
    assert (account.waits(at(1)), account.waits(at(2))) == (True, False)
    starts, counts = account.due(at(1, 2), at(30, 40))
    assert (starts[0].item(), counts.tolist()) == (29, [1, 0])
    account.note(at(1), at(30))
    assert account.true_length(1, 31) == 30
    due = account.due(at(1), at(31))
    account.saw(at(1), due, due[1] - 1)
    assert account.true_length(1, 31) == 30
    account.saw(at(1), account.due(at(1), at(31)), at(1))
    assert account.true_length(1, 31) == 31


def test_a_prompt_prefilled_plainly_makes_up_for_whatever_was_in_its_row():
    account = ledger()
    account.note(at(1, 2), at(10, 10))
    account.give_up(at(1, 2))
    account.prefilled_plainly(at(1, 2), at(-1, -1))
    assert not account.may_wait
    assert [account.true_length(row, 40) for row in (1, 2)] == [40, 40]


def test_a_catch_up_that_fails_right_behind_a_prompt_leaves_the_prompt_true():
    account = ledger()
    account.prefilled_plainly(at(1), at(29))
    account.note(at(1), at(30))
    account.give_up(at(1))
    assert account.true_length(1, 35) == 30
