"""The sandbox contract on bwrap hosts that Ray placed: the same tests as of every backend."""

from tests.sandbox.test_contract import *  # noqa: F403
