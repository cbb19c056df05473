"""Following a file that grows."""

from prime_rl.rundir.tail import Tail


def test_complete_lines_are_returned_once_and_a_partial_line_later(tmp_path):
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.new_lines() == []  # no file yet
    with path.open("a") as file:
        file.write("one\n\ntw")
        file.flush()
        assert tail.new_lines() == [b"one"]
        assert tail.new_lines() == []
        file.write("o\nthree\n")
        file.flush()
        assert tail.new_lines() == [b"two", b"three"]
