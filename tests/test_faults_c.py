"""Faults of tokens, templates and masks that users of other systems hit, and where each is a test.

ROWS names, for a symptom in our words, the tests that hold it; a row whose test is gone fails. C
counts the rows of the list of such faults, B the issues of SkyRL.
"""

import ast

import pytest

CONVERSATION = "tests/gateway/test_conversation.py"
PROPERTY = "tests/gateway/test_conversation_property.py"
SEQUENCES = "tests/batching/test_sequences.py"
HISTORIES = "tests/batching/test_histories.py"
LOOP = "tests/agents/test_loop.py"
RENDERER = "tests/generation/test_renderer.py"
SGLANG = "tests/generation/test_sglang.py"
EXACTLY_ONCE = f"{PROPERTY}::test_every_sampled_token_is_trained_once_or_counted"

ROWS = {
    "C1: the newline after an end of turn is dropped, more each turn": (
        f"{CONVERSATION}::test_the_next_prompt_is_the_stored_ids_and_a_rendered_delta",
        f"{CONVERSATION}::test_incremental_ids_are_those_of_one_render_where_the_text_encodes_to_itself",
        f"{RENDERER}::test_incremental_ids_equal_the_render_at_once",
        f"{RENDERER}::test_the_boundary_after_a_stopped_turn_begins_with_the_unsampled_newline",
    ),
    "C2: a parsed message is rendered again and trained": (
        f"{CONVERSATION}::test_a_replayed_turn_goes_on_from_its_stored_ids",
        EXACTLY_ONCE,
    ),
    "C3: a word sampled as two ids comes back as one": (
        f"{CONVERSATION}::test_a_word_sampled_in_two_pieces_stays_in_two_pieces",
        f"{SEQUENCES}::test_a_retokenized_span_makes_two_rows",
    ),
    "C4: the parent is found by messages though its thinking is gone": (
        f"{CONVERSATION}::test_thinking_cut_off_by_the_client_out_of_the_text_makes_two_rows",
        f"{SEQUENCES}::test_stripped_thinking_makes_two_rows_and_loses_nothing",
    ),
    "C5: a history that is no prefix kills the training": (
        f"{CONVERSATION}::test_a_changed_answer_forks_and_loses_nothing",
        f"{CONVERSATION}::test_thinking_cut_off_by_the_client_out_of_the_text_makes_two_rows",
        EXACTLY_ONCE,
    ),
    "C6: the prefix is the last step's alone": (f"{SEQUENCES}::test_three_turns_are_one_row",),
    "C7: of several prefixes the first is taken": (
        f"{SEQUENCES}::test_the_longest_match_wins",
        f"{SEQUENCES}::test_the_longest_match_wins_also_over_a_later_one",
        f"{CONVERSATION}::test_the_longest_match_wins",
    ),
    "C8: two tool messages become two turns": (
        f"{CONVERSATION}::test_a_run_of_tool_messages_is_rendered_together",
        f"{RENDERER}::test_a_run_of_tool_messages_is_one_block",
    ),
    "C9: the mask of more than one assistant turn is wrong": (
        f"{CONVERSATION}::test_two_answers_are_two_runs_of_ones",
        "tests/batching/test_minibatch.py::test_sft_batch",
    ),
    "C10: tokens are appended without their mask": (
        f"{SEQUENCES}::test_a_partial_answer_is_dropped_unless_it_was_continued",
        "tests/batching/test_packing.py::test_what_does_not_belong_is_refused_by_name",
        EXACTLY_ONCE,
    ),
    "C11: log-probs are absent": (
        f"{SEQUENCES}::test_log_probs_that_cannot_be_are_refused",
        f"{CONVERSATION}::test_what_cannot_be_rendered_or_recorded_is_refused",
    ),
    "C12: fewer log-probs than ids, or the filler": (
        f"{SEQUENCES}::test_fewer_log_probs_than_tokens_never_become_a_completion",
        f"{SEQUENCES}::test_log_probs_that_cannot_be_are_refused",
        f"{SGLANG}::test_fewer_logprobs_than_ids_are_refused",
        f"{SGLANG}::test_abort_in_the_queue_has_no_tokens",
    ),
    "C13: the ids lack what the text has": (
        f"{CONVERSATION}::test_ids_without_the_opening_of_a_call_are_text_and_are_trained",
    ),
    "C14: a history that is no prefix sets the whole mask to 0": (
        f"{CONVERSATION}::test_a_changed_answer_forks_and_loses_nothing",
        "tests/batching/test_minibatch.py::test_forks_are_in_the_metrics_by_cause",
    ),
    "C15: router replay is asked for and silently does nothing": (
        f"{SEQUENCES}::test_routing_that_is_needed_and_absent_is_refused",
        "tests/batching/test_minibatch.py::test_samples_without_routing_are_refused_where_it_is_replayed",
        f"{SGLANG}::test_routing_that_is_absent_or_of_other_tokens_is_refused",
    ),
    "C16: observations are cut by characters, prompts from the left": (
        f"{LOOP}::test_long_observations_are_cut_by_tokens_and_say_so",
        f"{LOOP}::test_an_opening_beyond_its_limit_is_not_cut_but_ends_the_episode",
        "tests/batching/test_minibatch.py::test_every_filter_is_in_the_ledger",
    ),
    "C17: special tokens are lost between ids and text": (
        f"{CONVERSATION}::test_any_sampled_id_is_kept_specials_too",
    ),
    "C35: a client that drops the thinking makes a fork of each turn": (
        f"{CONVERSATION}::test_eight_turns_of_thinking_replayed_without_it_are_one_row",
        f"{CONVERSATION}::test_a_replayed_turn_goes_on_from_its_stored_ids",
    ),
    "C36: each turn costs the whole conversation": (
        "tests/gateway/test_cost.py::test_every_turn_renders_and_parses_its_new_messages_alone",
        "tests/gateway/test_cost.py::test_a_history_that_grew_is_not_walked_from_its_root",
        "tests/gateway/test_cost.py::test_the_last_turns_take_no_longer_than_the_first",
        f"{LOOP}::test_the_last_of_128_turns_costs_no_more_than_the_first",
    ),
    "C37: rollouts come from weights nobody published": (
        "tests/sync/test_bridge.py::test_a_version_reaches_the_server",
        "tests/serve/test_server.py"
        "::test_sigterm_ends_it_cleanly_and_waiting_for_weights_serves_nothing",
    ),
    "C38: after a restart the generators serve another version than the trainer": (
        "tests/train/test_kill_resume.py"
        "::test_killed_five_times_ends_with_the_same_bits_and_leaves_nothing",
    ),
    "C39: masked tokens enter the ratio": (
        "tests/learner/test_step.py::test_masked_garbage_is_never_read",
        "tests/rl/test_losses.py::test_masked_garbage_reaches_neither_value_nor_gradient",
        "tests/batching/test_packing.py::test_garbage_log_probs_of_untrained_tokens_are_not_carried",
    ),
    "C40: ids are decoded and encoded again at some way of appending": (
        f"{CONVERSATION}::test_a_client_s_own_answers_and_later_turns_keep_the_sampled_ids",
        f"{LOOP}::test_sampled_ids_are_kept_even_when_text_would_encode_otherwise",
        EXACTLY_ONCE,
    ),
    "C4e: eleven histories": (
        f"{HISTORIES}::test_rows_of_a_history",
        f"{CONVERSATION}::test_the_same_call_again_gets_the_recorded_answer",
        f"{CONVERSATION}::test_a_call_without_tools_beside_calls_with_tools_is_auxiliary",
        f"{CONVERSATION}::test_another_system_prompt_is_a_new_root_and_still_work",
    ),
    "B123, B179: ids of the text are not the ids that were generated": (
        f"{CONVERSATION}::test_a_word_sampled_in_two_pieces_stays_in_two_pieces",
        EXACTLY_ONCE,
    ),
    "B178: thinking is dropped between turns": (
        f"{CONVERSATION}::test_a_replayed_turn_goes_on_from_its_stored_ids",
        f"{CONVERSATION}::test_eight_turns_of_thinking_replayed_without_it_are_one_row",
    ),
    "B2075: a thinking template moves offsets and an observation loses its head": (
        f"{CONVERSATION}::test_two_answers_are_two_runs_of_ones",
        EXACTLY_ONCE,
    ),
    "B710: the assistant's header and the newline after its end are trained": (
        f"{SEQUENCES}::test_the_mask_is_exactly_on_the_sampled_tokens",
        f"{CONVERSATION}::test_an_end_of_turn_that_was_not_sampled_is_rendered_and_never_trained",
        f"{LOOP}::test_the_training_row_masks_exactly_what_was_sampled",
    ),
    "B2148, B758: a sampled end is taken off and put back with log-prob 0 and mask 1": (
        f"{CONVERSATION}::test_an_end_of_turn_that_was_sampled_is_not_rendered_again",
        f"{CONVERSATION}::test_an_end_of_turn_that_was_not_sampled_is_rendered_and_never_trained",
        "tests/generation/test_generators.py::test_stop_token_is_kept",
    ),
    "B1319: what is overlong is told by a wrong end token": (
        f"{LOOP}::test_an_answer_cut_by_length_is_not_run_and_its_end_is_not_sampled",
        f"{CONVERSATION}::test_an_end_of_turn_that_was_sampled_is_not_rendered_again",
    ),
    "B406, B279: a budget of each turn, none of all; an answer without a token": (
        f"{LOOP}::test_the_episode_budget_caps_each_turn_and_then_ends_it",
        f"{SEQUENCES}::test_an_empty_answer_makes_no_row_and_abandons_nobody",
        f"{CONVERSATION}::test_an_empty_answer_is_legal",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_tests(repo_root, row):
    for node in ROWS[row]:
        path, name = node.split("::")
        tree = ast.parse((repo_root / path).read_text())
        made = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in made, node


def test_no_row_is_missing():
    told = " ".join(row.split(":")[0] for row in ROWS).replace(",", "").split()
    assert {f"C{n}" for n in (*range(1, 18), *range(35, 41))} <= set(told)
    numbers = (123, 179, 178, 2075, 710, 2148, 758, 1319, 406, 279)
    assert {f"B{n}" for n in numbers} <= set(told)
