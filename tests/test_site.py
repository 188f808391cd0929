"""The report of the committed records is a page of the documentation's site."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mssar.lab import records
from mssar.lab.report.tables import WEIGHT_DECAY

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs")
    spec = importlib.util.spec_from_file_location("site_report", ROOT / "docs/hooks/report.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(root: Path, site: Path) -> SimpleNamespace:
    return SimpleNamespace(
        config_file_path=str(root / "mkdocs.yml"),
        site_dir=str(site),
        use_directory_urls=False,
        plugins=SimpleNamespace(_current_plugin="report"),
    )


def test_the_site_has_every_record_and_a_way_back(hook, tmp_path):
    from mkdocs.structure.files import Files

    (made,) = hook.on_files(Files([]), config=configuration(ROOT, tmp_path))
    assert made.url == hook.NAME
    made.copy_file()
    page = (tmp_path / hook.NAME).read_text("utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    known = {record.id for record in records.read(ROOT / "records")}
    assert data["provenance"].keys() == known
    assert '<a href="index.html">Documentation</a>' in page
    seen = [(one["label"], one["dataset"], len(one["images"])) for one in data["explained"]]
    assert seen == [
        (f"{network} mssar, seed 0", dataset, 10)
        for network in ("resnet56", "resnet20")
        for dataset in ("cifar10", "cifar100")
    ]
    assert data["curves"][0]["dataset"] == "cifar10"  # the paper's before photographs of ours
    assert data["curves"][-1]["dataset"] == "imagefolder"
    assert f": {hook.NAME} " in (ROOT / "mkdocs.yml").read_text("utf-8")
    # Beside a gain that a larger weight decay has as well, it says so, and where more is said.
    assert page.count(f'<a href="results-paper.html#a-larger-weight-decay">{WEIGHT_DECAY}</a>') == 4
    assert "\n## A larger weight decay\n" in (ROOT / "docs/results-paper.md").read_text("utf-8")


def test_a_record_that_cannot_be_read_fails_the_build(hook, tmp_path):
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import Files

    (tmp_path / "records").mkdir()
    (tmp_path / "records/table3.jsonl").write_text('{"half\n')
    with pytest.raises(PluginError, match=r"table3.jsonl"):
        hook.on_files(Files([]), config=configuration(tmp_path, tmp_path / "site"))
