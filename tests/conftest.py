"""What every test may ask for: a pool of gloo ranks, and stored texts to compare with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gloo import Pool

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ with what the tests produce")


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    """`gloo.run(world_size, function, *args)`: the function's value on each rank."""
    pool = Pool()
    yield pool
    pool.kill()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)`: the text equals the stored one, or replaces it with --update-golden."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"no {file.name} in tests/golden yet: run once with --update-golden"
        assert text == file.read_text(encoding="utf-8")

    return check
