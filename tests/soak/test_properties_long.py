"""The properties of ``make test``, each with thirty times as many examples; the validator against thousands of plans."""

from __future__ import annotations

import pytest

from crossfade.schedule.cost import CostModel
from crossfade.types import Transport
from tests.unit.test_collectives import test_pl1_to_pl4_every_plan_with_collectives_is_sound
from tests.unit.test_device_proof import test_the_real_ring_has_no_fault, test_the_real_staged_copies_have_no_fault
from tests.unit.test_graph_check import test_a_sound_graph_comes_back_sorted_and_whole
from tests.unit.test_graph_draw import (
    test_an_svg_has_every_box_and_every_edge,
    test_layers_bends_and_places,
    test_lines_in_letters_lead_where_the_edges_do,
)
from tests.unit.test_graph_nodes import test_random_graphs
from tests.unit.test_ops_proof import test_pr1_pr2_operators_have_no_fault
from tests.unit.test_ops_turns_proof import test_pr1_pr2_sums_in_turns_have_no_fault
from tests.unit.test_plan_text import (
    test_damaged_plans_are_refused_or_other_plans,
    test_garbage_is_refused,
    test_random_plans_parse_back,
)
from tests.unit.test_plan_validate_proof import (
    check_failing,
    check_growth,
    check_verdicts,
    test_the_verdict_after_several_changes,
)
from tests.unit.test_schedule import (
    test_every_plan_is_sound_by_the_exhaustive_search_too,
    test_overlap_changes_no_node_and_no_value,
)
from tests.unit.test_simulate_gpus import test_sound_plans_come_to_their_end
from tests.unit.test_simulate_ticks import SLEEPY, SPINNING, check_against_the_clock
from tests.unit.test_transports import (
    test_pl2_plans_with_gpus_are_sound_by_the_exhaustive_search_too,
    test_pl4_the_inline_engine_runs_plans_with_device_channels,
)
from tests.unit.test_turns import test_predecessors_are_used_before_at_the_same_reader_and_never_go_in_a_circle
from tests.unit.test_turns_proof import test_any_plans_of_three_writers

pytestmark = pytest.mark.timeout(3600)

__all__ = [
    "test_a_sound_graph_comes_back_sorted_and_whole",
    "test_an_svg_has_every_box_and_every_edge",
    "test_any_plans_of_three_writers",
    "test_damaged_plans_are_refused_or_other_plans",
    "test_every_plan_is_sound_by_the_exhaustive_search_too",
    "test_garbage_is_refused",
    "test_layers_bends_and_places",
    "test_lines_in_letters_lead_where_the_edges_do",
    "test_overlap_changes_no_node_and_no_value",
    "test_pl1_to_pl4_every_plan_with_collectives_is_sound",
    "test_pl2_plans_with_gpus_are_sound_by_the_exhaustive_search_too",
    "test_pl4_the_inline_engine_runs_plans_with_device_channels",
    "test_pr1_pr2_operators_have_no_fault",
    "test_pr1_pr2_sums_in_turns_have_no_fault",
    "test_predecessors_are_used_before_at_the_same_reader_and_never_go_in_a_circle",
    "test_random_graphs",
    "test_random_plans_parse_back",
    "test_sound_plans_come_to_their_end",
    "test_the_real_ring_has_no_fault",
    "test_the_real_staged_copies_have_no_fault",
    "test_the_verdict_after_several_changes",
]


def test_pl1_to_pl4_the_verdict_is_that_of_all_interleavings() -> None:
    check_verdicts(8_000)


def test_pl2_sound_plans_with_methods_that_fail() -> None:
    check_failing(8_000)


@pytest.mark.parametrize(("num_actors", "transport"), [(4, Transport.SHM), (4, Transport.GLOO), (200, Transport.GLOO)])
def test_the_validators_work_is_linear_in_the_number_of_nodes(num_actors: int, transport: Transport) -> None:
    check_growth(num_actors, transport, 1_000)


@pytest.mark.parametrize(("costs", "max_inflight"), [(SPINNING, 4), (SLEEPY, 1)], ids=["spinning", "sleepy"])
def test_the_simulator_equals_a_clock_that_ticks(costs: CostModel, max_inflight: int) -> None:
    check_against_the_clock(costs, max_inflight, 4_000)
