"""Options of a command follow from the fields of a dataclass."""

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from ffmem.config_fields import (
    check_options,
    dataclass_options,
    from_parameters,
    option,
    take_options,
)
from ffmem.errors import FfmemError


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = option("Name.")
    layers: int = option("Layers.", 2, minimum=1)
    rate: float = option("Rate.", 0.5, above=0, below=1)
    mode: str = option("Mode.", "fast", choices=("fast", "slow"))
    sizes: list[int] | None = option("Sizes.", None)
    limit: int | None = option("Limit.", None, minimum=0, below=10)
    top: int = option("Top.", 5, minimum=1, maximum=1_000, flag="-k")
    quick: bool = option("Quick.", False)
    sample: int | str = option("Sample.", 9, minimum=1, choices=("all",))
    derived: int = 7  # not an option

    def __post_init__(self):
        check_options(self)


@click.command(context_settings={"show_default": True})
@dataclass_options(Config)
def command(**values):
    click.echo(repr(Config(**values)))


def run(*arguments):
    return CliRunner().invoke(command, arguments)


def test_options_have_the_names_types_and_defaults_of_the_fields():
    assert run("--name", "a").output.strip() == repr(Config(name="a"))
    given = ["--name", "b", "--layers", "3", "--rate", "0.25", "--mode", "slow"]
    found = run(*given, "--sizes", "1, 20,3", "--limit", "0", "-k", "6", "--quick").output.strip()
    expected = Config(
        name="b", layers=3, rate=0.25, mode="slow", sizes=[1, 20, 3], limit=0, top=6, quick=True
    )
    assert found == repr(expected)
    for given, sample in (("all", "all"), ("12", 12)):
        found = run("--name", "a", "--sample", given).output.strip()
        assert found == repr(Config(name="a", sample=sample))


def test_help_lists_the_options_in_the_order_of_the_fields():
    text = run("--help").output
    names = ["--name", "--layers", "--rate", "--mode", "--sizes", "--limit", "-k", "--quick"]
    places = [text.index(name) for name in names]
    assert places == sorted(places)
    assert "[required]" in text.split("--layers")[0]
    assert "default: 0.5" in text
    assert "--derived" not in text


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--layers", "0"], ["--layers", "x"], ["--rate", "0"], ["--rate", "1"]),
        *(["--mode", "odd"], ["--sizes", "1,x"], ["--sizes", ""], ["--sizes", "-3"]),
        *(["--limit", "10"], ["--limit", "-1"], ["--derived", "1"], ["-k", "0"], ["-k", "1001"]),
        *(["--sample", "0"], ["--sample", "some"], ["--sample", "9" * 5000]),
    ],
)
def test_wrong_options_are_wrong_usage(wrong):
    assert run("--name", "a", *wrong).exit_code == 2


def test_a_required_option_is_required():
    assert run().exit_code == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "`layers` 0: use a whole number at least 1"),
        ({"rate": 0.0}, "`rate` 0.0: use a number above 0 and below 1"),
        ({"rate": 1.0}, "`rate` 1.0"),
        ({"rate": float("nan")}, "`rate` nan"),
        ({"mode": "odd"}, "`mode` odd: unknown value. Use one of fast, slow"),
        ({"layers": 2.0}, "`layers` 2.0: use a whole number at least 1"),
        ({"layers": True}, "`layers` True"),
        ({"rate": "0.5"}, "`rate` '0.5': use a number"),
        ({"top": 1_001}, "-k 1001: use a whole number at least 1 and at most 1,000"),
        ({"sample": "some"}, "`sample` 'some': use a whole number at least 1 or 'all'"),
        ({"sample": 0}, "`sample` 0: use a whole number at least 1 or 'all'"),
        ({"limit": 10}, "`limit` 10: use a whole number at least 0 and below 10"),
    ],
)
def test_python_callers_get_the_same_checks(wrong, message):
    with pytest.raises(FfmemError, match=message):
        Config(name="a", **wrong)


def test_an_error_is_of_the_kind_that_is_asked_for():
    class OwnError(FfmemError):
        pass

    config = Config(name="a")
    object.__setattr__(config, "layers", 0)
    with pytest.raises(OwnError, match="`layers` 0"):
        check_options(config, OwnError)


def test_a_command_may_have_some_of_the_options_and_defaults_of_its_own():
    @click.command()
    @dataclass_options(Config, only=("layers", "mode"), defaults={"layers": 7, "mode": None})
    def other(**values):
        click.echo(repr(values))

    assert CliRunner().invoke(other, []).output == "{'layers': 7, 'mode': None}\n"
    assert CliRunner().invoke(other, ["--rate", "0.5"]).exit_code == 2


def test_the_options_of_a_config_are_taken_from_the_values_of_a_command():
    values = dict.fromkeys(Config.__dataclass_fields__) | {"name": "a", "more": 1}
    assert take_options(values, Config)["name"] == "a"
    assert values == {"derived": None, "more": 1}


def test_a_config_is_made_of_the_parameters_of_a_function():
    given = {name: getattr(Config, name, "a") for name in Config.__dataclass_fields__}
    assert from_parameters(Config, {**given, "layers": 4, "other": 1}) == Config(name="a", layers=4)
