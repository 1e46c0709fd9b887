import pytest
from hypothesis import HealthCheck, settings

# No deadline, no minimum speed of drawing and no database: the machine may be busy, and a run leaves nothing behind.
settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_ADAPTIVE_SPEC", "SGLANG_ADAPTIVE_SPEC_CONFIG", "SGLANG_ADAPTIVE_SPEC_ALLOW_DRIFT"):
        # Set first, so that whatever the code under test writes is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
