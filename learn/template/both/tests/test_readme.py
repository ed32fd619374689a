import re
from pathlib import Path


def test_examples():
    readme = Path(__file__).parents[1].joinpath("README.md").read_text("utf-8")
    examples = re.findall("```python\n(.+?)```", readme, re.DOTALL)
    assert examples
    for example in examples:
        exec(example, {})
