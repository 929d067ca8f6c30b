"""The sandbox contract on pods: the same tests as of every backend that kubernetes can have."""

from tests.sandbox.test_contract import (  # noqa: F401
    test_a_cancelled_command_is_ended_and_the_next_one_works,
    test_commands,
    test_destroy_is_idempotent_and_final,
    test_many_at_once_do_not_see_each_other,
    test_nothing_outlives_a_command,
    test_output_is_bytes_of_any_kind_and_any_amount,
    test_put_and_get,
    test_snapshots,
    test_stdin,
    test_the_lifetime_ends_a_sandbox,
    test_upper_layers_win_and_writes_stay_inside,
)
