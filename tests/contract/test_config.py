"""What --additional-config may say: every key, every bad value, and nothing of anybody else's."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as patience
from hypothesis import strategies as st

from kvpp_connectors.connector.options import nearest
from kvpp_connectors.launch.options import KvppOptions, read_settings
from kvpp_connectors.launch.problems import Problem, Severity
from kvpp_core.layout import ScratchPolicy
from kvpp_core.ownership import OwnershipPolicy
from kvpp_core.policy import BroadcastPolicy, CostModel, DecodePolicy

INFINITY = float("inf")

COST = {"latency_s": 1e-4, "per_range_s": 2e-5, "bytes_per_s": 1e9, "packed_bytes_per_s": 2e9}

# option: (good values with what they are read as, bad values)
VALUES: dict[str, tuple[dict[Any, Any], list[Any]]] = {
    "broadcast": (
        {policy.value: policy for policy in BroadcastPolicy},
        ["everything", "AUTO", "", 1, True, None, ["auto"], {"mode": "auto"}],
    ),
    "decode": (
        {policy.value: policy for policy in DecodePolicy},
        ["automatic", "OWNER", "", 1, True, None, ["owner"]],
    ),
    "ownership": (
        {policy.value: policy for policy in OwnershipPolicy},
        ["layers", 0, False, None, [], {}],
    ),
    "broadcast_cost": (
        {None: None},
        ["measured", 1, True, []],
    ),
    "scratch": (
        {policy.value: policy for policy in ScratchPolicy},
        ["slots", 0, False, None, [], {}],
    ),
    "staging_bytes": ({0: 0, 1: 1, 1 << 40: 1 << 40}, [-1, "32MiB", "1", 1.5, 2.0, True, None, []]),
    "reserve_bytes": ({0: 0, 1 << 30: 1 << 30}, [-1, "1GiB", 0.5, False, None, {}]),
    "alignment_bytes": ({1: 1, 4096: 4096}, [0, -512, "page", 1.0, True, None, []]),
    "transfer_timeout_s": (
        {1: 1.0, 0.5: 0.5, 3600: 3600.0},
        [0, -1, -0.5, "soon", "30", True, None, [], INFINITY, math.nan, 1e300],
    ),
    "load_timeout_s": (
        {1: 1.0, 0.25: 0.25},
        [0, -30, "30s", "30", True, None, {}, INFINITY, -INFINITY, math.nan],
    ),
    "metrics_port": ({1: 1, 65535: 65535, None: None}, [0, 65536, -1, "9400", 1.5, True, []]),
    "poison_scratch": ({True: True, False: False}, ["true", 1, 0, None, []]),
    "cpu_profile": ({True: True, False: False}, ["yes", "false", 1, None, {}]),
}

BAD = [(option, value) for option, (_, bad) in VALUES.items() for value in bad]
GOOD = [(option, *pair) for option, (good, _) in VALUES.items() for pair in good.items()]


def only(problems: list[Problem]) -> Problem:
    """The one problem, a refusal that can be read."""
    (problem,) = problems
    assert problem.severity is Severity.REFUSED
    assert problem.reason.strip() and problem.remedy.strip()
    return problem


def test_the_costs_of_a_broadcast_may_be_given() -> None:
    settings, problems = read_settings({"kvpp": {"broadcast_cost": COST}})
    assert problems == [] and settings.options.broadcast_cost is not None
    assert settings.options.broadcast_cost.model() == CostModel(1e-4, 2e-5, 1e9, 2e9)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"latency_s": -1}, "latency_s"),
        ({"latncy_s": 1}, "latncy_s"),
        ({"per_range_s": 2}, "per_range_s"),
        ({"bytes_per_s": 0}, "bytes_per_s"),
        ({"packed_bytes_per_s": "4 GB"}, "packed_bytes_per_s"),
    ],
)
def test_a_wrong_cost_is_named(wrong: dict[str, object], named: str) -> None:
    problem = only(read_settings({"kvpp": {"broadcast_cost": COST | wrong}})[1])
    assert problem.option == f"additional_config.kvpp.broadcast_cost.{named}"


def test_every_missing_cost_is_named() -> None:
    problems = read_settings({"kvpp": {"broadcast_cost": {"latency_s": 1e-4}}})[1]
    assert len(problems) == len(COST) - 1


def test_nothing_said_is_kvpp_off_with_defaults() -> None:
    configs: list[dict[str, Any]] = [{}, {"kvpp": {}}, {"enable_kvpp": False}]
    for nothing in configs:
        settings, problems = read_settings(nothing)
        assert problems == []
        assert settings.enabled is False
        assert settings.options == KvppOptions()


def test_the_defaults_are_the_documented_ones() -> None:
    assert KvppOptions().model_dump(mode="json") == {
        "broadcast": "auto",
        "decode": "broadcast",
        "ownership": "count",
        "broadcast_cost": None,
        "scratch": "largest",
        "staging_bytes": 33_554_432,
        "reserve_bytes": 0,
        "alignment_bytes": 1,
        "transfer_timeout_s": 120.0,
        "load_timeout_s": 30.0,
        "metrics_port": None,
        "poison_scratch": False,
        "cpu_profile": False,
    }


def test_the_switch_alone_is_kvpp_on_with_defaults() -> None:
    settings, problems = read_settings({"enable_kvpp": True})
    assert problems == []
    assert settings.enabled is True
    assert settings.options == KvppOptions()


@pytest.mark.parametrize("value", ["true", "True", "", 1, 0, 1.0, None, [], [True], {}])
def test_the_switch_takes_nothing_but_a_boolean(value: object) -> None:
    """A value that only looks like true neither switches KVPP on nor passes unseen."""
    settings, problems = read_settings({"enable_kvpp": value})
    problem = only(problems)
    assert settings.enabled is False
    assert problem.option == "additional_config.enable_kvpp"
    assert problem.value == repr(value)
    assert "boolean" in problem.reason
    assert '{"enable_kvpp": true}' in problem.remedy


def test_every_option_has_good_and_bad_values_here() -> None:
    assert set(VALUES) == set(KvppOptions.model_fields)


@pytest.mark.parametrize(("option", "value", "read"), GOOD, ids=str)
def test_good_values_are_read(option: str, value: object, read: object) -> None:
    settings, problems = read_settings({"enable_kvpp": True, "kvpp": {option: value}})
    assert problems == []
    found = getattr(settings.options, option)
    assert found == read and type(found) is type(read)
    others = KvppOptions().model_dump(exclude={option})
    assert settings.options.model_dump(exclude={option}) == others


@pytest.mark.parametrize(("option", "value"), BAD, ids=str)
def test_a_bad_value_names_option_value_and_what_is_expected(option: str, value: object) -> None:
    settings, problems = read_settings({"enable_kvpp": True, "kvpp": {option: value}})
    problem = only(problems)
    assert problem.rule == "option-values"
    assert problem.option == f"additional_config.kvpp.{option}"
    assert problem.value == repr(value)
    description = KvppOptions.model_fields[option].description
    assert description is not None and description in problem.remedy
    assert settings.options == KvppOptions()  # what cannot be read counts as its default
    assert settings.enabled is True


def test_all_problems_are_told_at_once() -> None:
    bad = {option: values[0] for option, (_, values) in VALUES.items()}
    _, problems = read_settings(
        {"enable_kvpp": "yes", "kvpp_size": 2, "kvpp": {**bad, "brodcast": "auto"}}
    )
    assert sorted(problem.option for problem in problems) == sorted(
        [
            "additional_config.enable_kvpp",
            "additional_config.kvpp_size",
            "additional_config.kvpp.brodcast",
            *(f"additional_config.kvpp.{option}" for option in bad),
        ]
    )


@pytest.mark.parametrize("value", [None, True, 1, "auto", ["auto"], [["broadcast", "auto"]]])
def test_the_options_are_an_object(value: object) -> None:
    problem = only(read_settings({"kvpp": value})[1])
    assert problem.option == "additional_config.kvpp"
    assert problem.value == repr(value)
    assert "object" in problem.reason and "{" in problem.remedy


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("enable_kvp", "enable_kvpp"),
        ("enable-kvpp", "enable_kvpp"),
        ("enabled_kvpp", "enable_kvpp"),
        ("enablekvpp", "enable_kvpp"),
        ("enable_KVPP", "enable_kvpp"),
        ("Enable_KVPP", "enable_kvpp"),
        ("KVPP", "kvpp"),
        ("enable_kpvp", "enable_kvpp"),
        ("enable_kvvp", "enable_kvpp"),
        ("kvp", "kvpp"),
        ("kvpps", "kvpp"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(key: str, meant: str) -> None:
    settings, problems = read_settings({key: True})
    problem = only(problems)
    assert problem.option == f"additional_config.{key}"
    assert problem.remedy == f"Did you mean {meant!r}?"
    assert settings.enabled is False


@pytest.mark.parametrize("key", ["kvpp_transport_backend_for_decode"])
def test_a_key_that_is_near_to_nothing_is_refused_with_all_keys(key: str) -> None:
    assert only(read_settings({key: True})[1]).remedy == "Known: enable_kvpp, kvpp."


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("brodcast", "broadcast"),
        ("owner", "ownership"),
        ("staging_byte", "staging_bytes"),
        ("transfer_timeout", "transfer_timeout_s"),
        ("poison", "poison_scratch"),
        ("cpu-profile", "cpu_profile"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest(key: str, meant: str) -> None:
    problem = only(read_settings({"kvpp": {key: 1}})[1])
    assert problem.option == f"additional_config.kvpp.{key}"
    assert problem.remedy == f"Did you mean {meant!r}?"


@pytest.mark.parametrize("option", KvppOptions.model_fields)
@pytest.mark.parametrize("ours", [{"enable_kvpp": True}, {"enable_kvpp": False}, {"kvpp": {}}])
def test_an_option_one_level_too_high_is_refused_with_its_place(
    ours: dict[str, Any], option: str
) -> None:
    """It would do nothing, in silence."""
    problem = only(read_settings({**ours, option: 1})[1])
    assert (problem.option, problem.value) == (f"additional_config.{option}", "1")
    assert f"additional_config.kvpp.{option}" in problem.remedy


def test_the_same_key_without_a_word_of_kvpp_is_somebody_elses() -> None:
    assert read_settings({"metrics_port": 9400, "decode": {"tp_size": 8}})[1] == []


def test_the_retired_group_size_is_refused_with_its_reason() -> None:
    problem = only(read_settings({"enable_kvpp": True, "kvpp_size": 4})[1])
    assert problem.option == "additional_config.kvpp_size"
    assert "TP x PCP" in problem.reason
    assert problem.remedy == "Remove it."


def test_keys_of_others_are_left_alone() -> None:
    """vllm-ascend and others keep their settings in the same object."""
    others = {
        "ascend_scheduler_config": {"enabled": True},
        "enable_kv_nz": 1,
        "kv_cache_something": "x",
        "torchair_graph_config": None,
    }
    settings, problems = read_settings({**others, "enable_kvpp": True})
    assert problems == []
    assert settings.enabled is True


def test_nearest_lists_everything_when_nothing_is_near() -> None:
    assert nearest("zzz", ("beta", "alpha")) == "Known: alpha, beta."


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats()  # json.loads reads NaN and Infinity too
    | st.text(max_size=12)
    | st.sampled_from([value for good, bad in VALUES.values() for value in (*good, *map(str, bad))])
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=8,
)
_OPTIONS = st.dictionaries(st.sampled_from(sorted(VALUES)) | st.text(max_size=12), _JSON)


# The machine may be busy: neither slowness of an example nor of drawing it says anything here.
_patient = patience(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_patient
@given(value=_JSON | _OPTIONS)
@example(value={"transfer_timeout_s": 10**400})
@example(value={"\ud800": 1})
def test_any_json_gives_settings_and_problems_but_no_exception(value: Any) -> None:
    """And what is accepted can be worked with: enums, finite positive times, bytes >= 0."""
    settings, problems = read_settings({"enable_kvpp": True, "kvpp": value})
    assert settings.enabled is True
    assert isinstance(settings.options, KvppOptions)
    for problem in problems:
        assert problem.option.startswith("additional_config.kvpp")
        assert problem.reason and problem.remedy and str(problem)
    if problems:
        assert settings.options == KvppOptions()
    else:
        assert isinstance(value, dict) and set(value) <= set(VALUES)
    options = settings.options
    assert isinstance(options.broadcast, BroadcastPolicy)
    assert isinstance(options.ownership, OwnershipPolicy)
    assert options.staging_bytes >= 0 and options.reserve_bytes >= 0
    assert options.alignment_bytes >= 1
    for seconds in (options.transfer_timeout_s, options.load_timeout_s):
        assert 0 < seconds < math.inf


@_patient
@given(config=st.dictionaries(st.text(max_size=12), _JSON, max_size=6))
def test_any_additional_config_can_be_read(config: dict[str, Any]) -> None:
    read_settings(config)
