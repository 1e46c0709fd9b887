"""Reading a release's source, from a folder and from a wheel alike."""

import zipfile

import pytest

from sglang_adaptive_spec.releases.source import Source

FILES = {
    "sglang/__init__.py": "",
    "sglang/maker.py": "def make(a): ...",
    "sglang/user.py": "from sglang.maker import make as build\nif True:\n    from sglang.gone import lost",
    "sglang/thing.py": """
LIMIT = 3
class Thing:
    declared: int
    assigned = 1
    def __init__(self):
        self.kept, other.foreign = 1, 2
    @property
    def computed(self): ...
""",
}


@pytest.fixture(params=["folder", "wheel"])
def source(request, tmp_path) -> Source:
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "sglang-1-py3-none-any.whl", "w") as wheel:
            for name, text in FILES.items():
                wheel.writestr(name, text)
        return Source(tmp_path / "sglang-1-py3-none-any.whl")
    (tmp_path / "sglang").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return Source(tmp_path)


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("sglang.maker:make", "sglang.maker:make"),
        ("sglang.user:build", "sglang.maker:make"),
        ("sglang.user:make", None),
        ("sglang.user:lost", None),
        ("sglang.absent:make", None),
    ],
)
def test_a_name_is_followed_to_where_its_function_is_written(source, name, origin):
    assert source.origin(name) == origin


@pytest.mark.parametrize("name", ["declared", "assigned", "kept", "computed"])
def test_attributes_are_found_however_a_class_has_them(source, name):
    assert source.has_attribute(f"sglang.thing:Thing.{name}")


@pytest.mark.parametrize("name", ["thing:Thing.foreign", "thing:Thing.LIMIT", "thing:Other.kept", "absent:LIMIT"])
def test_what_a_class_does_not_have_is_not_found(source, name):
    assert not source.has_attribute(f"sglang.{name}")


def test_names_of_a_module_are_attributes_too(source):
    assert source.has_attribute("sglang.thing:LIMIT")
    assert source.has_attribute("sglang.user:build")


def test_a_folder_without_sglang_is_no_source(tmp_path):
    with pytest.raises(FileNotFoundError, match="no sglang package in"):
        Source(tmp_path)
