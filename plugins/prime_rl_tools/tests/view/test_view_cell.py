"""The live view in the output of a notebook's cell."""

from rich.text import Text

from prime_rl_tools.view.cell import Cell


class Output:
    """Keeps what IPython's ``display`` and its handle are given."""

    def __init__(self):
        self.bundles = []

    def __call__(self, bundle, *, raw, display_id):
        self.bundles.append(bundle)
        return self

    def update(self, bundle, *, raw):
        self.bundles.append(bundle)


def test_the_output_is_replaced_when_the_picture_is_new():
    output = Output()
    cell = Cell(output)
    cell.start()
    for text in ("step 1", "step 1", "<step 2>"):
        cell.update(Text(text, "bold"), refresh=True)
    cell.stop()
    assert [bundle["text/plain"] for bundle in output.bundles] == ["", "step 1\n", "<step 2>\n"]
    assert "&lt;step 2&gt;" in output.bundles[-1]["text/html"]
