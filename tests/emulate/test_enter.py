"""Which folder another interpreter is told to import this package from."""

from pathlib import Path

import vramprobe
from vramprobe.emulate.enter import package_home


def test_a_checkout_is_searched_as_it_is(tmp_path):
    assert package_home(tmp_path) == Path(vramprobe.__file__).parents[1]
    assert list(tmp_path.iterdir()) == []


def test_of_an_environment_only_the_package_is_searched(tmp_path):
    package = tmp_path / "lib" / "site-packages" / "vramprobe"
    machine = tmp_path / "machine"
    for folder in (package, package.parent / "torch", machine):
        folder.mkdir(parents=True)
    home = package_home(machine, package)
    assert [path.name for path in home.iterdir()] == ["vramprobe"]
    assert (home / "vramprobe").resolve() == package
    assert home.is_relative_to(machine)  # it goes with the machine
