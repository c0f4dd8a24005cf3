"""A YAML file of sweeps or campaigns → its content; each way to write YAML wrongly has its message.

In: a path. Out: mappings, lists and values, or a SpecError that names the file and the line. Knows no key.
"""

from pathlib import Path
from typing import Any

from vramprobe import catalog
from vramprobe.errors import SpecError


def parsed(path: Path) -> Any:
    """Parse a YAML file. Raises SpecError for what cannot be read, a key that is there twice, and an empty file."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML keeps the last of two equal keys without a word; here they are an error."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    continue
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise SpecError(f"{path}, line {line}: {key_node.value!r} is there twice; keep one")
                seen.add(key_node.value)
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        known = ", ".join(catalog.list_sweeps())
        raise SpecError(f"no sweep file {path}; give one's path, or the name of one that ships: {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the sweep file {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise SpecError(f"{path}{line} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:  # a date that no calendar has, 5,000 digits or brackets
        raise SpecError(f"{path} holds a value that YAML cannot read: {error}") from None
    if content is None:
        raise SpecError(f"{path} is empty; write `cells:` and under it a list of blocks, each `- model: …`")
    return content
