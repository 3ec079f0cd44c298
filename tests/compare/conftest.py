import pytest

from regard.compare import measure


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Layers are warm after their calls, however soon those are over: no test here is about the numbers of seconds."""
    monkeypatch.setattr(measure, "WARM_UP_SECONDS", 0.0)
