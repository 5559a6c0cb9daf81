from pathlib import Path

from tests.support.rejections import rejected

from posttrain.commands.check_data import main
from posttrain.plan.resolve import resolve
from posttrain.store import Paths

CONFIG = Path(__file__).parents[3] / "config"


def test_what_is_not_made_yet_is_told_with_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with rejected("not-made-yet", "`snakemake --cores 2 check_data`"):
        main(Paths(resolve({"model": "tiny", "site": "local"}, CONFIG)))
