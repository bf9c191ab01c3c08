"""A job that is not sharded as planned is stopped before it can run out of memory."""

from __future__ import annotations

from tests.training.rank_checks import Measured


def test_a_model_that_is_not_sharded_is_stopped(measured: Measured) -> None:
    found = measured("unsharded_model_is_stopped")
    assert found["reason"] == "not_sharded"
    assert found["message"] == (
        "Stopped before the first step: 0 sharding units were formed, 4 planned."
    )


def test_what_was_seen_is_on_record_before_the_stop(measured: Measured) -> None:
    observed = measured("unsharded_model_is_stopped")["observed"]
    assert observed["local_parameter_bytes"] == observed["whole_model_bytes"]
    assert observed["expected_local_parameter_bytes"] < 0.52 * observed["whole_model_bytes"]


def test_one_rank_that_is_not_sharded_stops_the_others(measured: Measured) -> None:
    found = measured("one_coarse_rank_stops_all")
    assert found["reason"] == "not_sharded"
