"""Dense retrieval from a prebuilt FAISS index with its FlashRAG corpus."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, DataError, InfraError
from agentenv.envs.search.corpus import Query
from agentenv.envs.search.faiss_index import FaissBackend, FaissConfig, VectorEncoder
from tests.support.begun import closing
from tests.support.dense import TEXTS, make, save_encoder

faiss: Any = pytest.importorskip("faiss")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
async def test_the_nearest_passage_is_found(tmp_path: Path, encoder: str, pooling: Any) -> None:
    async with closing(FaissBackend(make(tmp_path, encoder, pooling=pooling))) as backend:
        for number, text in enumerate(TEXTS):
            hits = await backend.search(Query(text, max_results=9))
            assert (hits[0].id, hits[0].title, hits[0].text) == (str(number), f"T{number}", text)
            assert hits[0].score == pytest.approx(1.0, abs=1e-5)
            assert len(hits) == 3
        document = await backend.document("corpus:1")
        assert document is not None
        assert document.text == TEXTS[1]


async def test_concurrent_queries_are_encoded_together(tmp_path: Path, encoder: str) -> None:
    async with closing(FaissBackend(make(tmp_path, encoder))) as backend:
        await backend.start()
        asked = [Query(text, max_results=number + 1) for number, text in enumerate(TEXTS)] * 20
        leaving = asyncio.ensure_future(backend.search(asked[0]))
        found = asyncio.gather(*map(backend.search, asked))
        await asyncio.sleep(0)
        leaving.cancel()  # does not cancel the other queries
        for query, hits in zip(asked, await found, strict=True):
            assert hits[0].text == query.text
            assert len(hits) == query.max_results
        assert backend.num_batches <= 3
        alone = await backend.search(asked[2])
        together = (await found)[2]
        assert [hit.id for hit in alone] == [hit.id for hit in together]
        scores = [hit.score for hit in together]
        assert [hit.score for hit in alone] == pytest.approx(scores, abs=1e-5)


async def test_closing_a_backend_releases_its_waiters(tmp_path: Path, encoder: str) -> None:
    backend = FaissBackend(make(tmp_path, encoder))
    await backend.start()
    waiting = [asyncio.ensure_future(backend.search(Query("lima"))) for _ in range(100)]
    await asyncio.sleep(0)
    await backend.close()
    done, pending = await asyncio.wait(waiting)
    assert len(done) == 100
    assert not pending


async def test_a_failing_search_fails_every_waiting_query(
    tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with closing(FaissBackend(make(tmp_path, encoder))) as backend:
        await backend.start()

        def fail(encoder: VectorEncoder, texts: list[str]) -> Any:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patched:
            patched.setattr(VectorEncoder, "encode", fail)
            asked = [backend.search(Query("lima")) for _ in range(3)]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, InfraError) for one in outcomes)
        assert "out of memory" in str(outcomes[0])
        assert (await backend.search(Query(TEXTS[0])))[0].text == TEXTS[0]


def test_the_prefix_precedes_the_query(tmp_path: Path, encoder: str) -> None:
    plain = VectorEncoder(make(tmp_path, encoder))
    prefixed = VectorEncoder(make(tmp_path, encoder, prefix="rome "))
    assert prefixed.encode(["lima"]) == pytest.approx(plain.encode(["rome lima"]), abs=1e-6)


def test_padding_changes_no_vector(tmp_path: Path, encoder: str) -> None:
    encode = VectorEncoder(make(tmp_path, encoder)).encode
    assert encode(["lima", TEXTS[1]])[0] == pytest.approx(encode(["lima"])[0], abs=1e-5)


async def test_index_and_corpus_of_different_length_are_refused(
    tmp_path: Path, encoder: str
) -> None:
    async with closing(FaissBackend(make(tmp_path, encoder, num_rows=2))) as backend:
        with pytest.raises(DataError, match="2 passages; expected"):
            await backend.start()


async def test_an_index_or_encoder_that_cannot_be_loaded_is_refused(
    tmp_path: Path, encoder: str
) -> None:
    config = make(tmp_path, encoder)
    (tmp_path / "bad.index").write_text("nonsense")
    wide = faiss.IndexFlatIP(5)
    wide.add(VectorEncoder(config).encode(TEXTS)[:, :5].copy())
    faiss.write_index(wide, str(tmp_path / "wide.index"))
    for name, message in [
        ("none", r"search\.backend\.index: .*is not a file"),
        ("bad", r"is not a FAISS index"),
        ("wide", r"search\.backend\.encoder: .*size 16, but the index .* has 5"),
    ]:
        changed = FaissConfig(str(tmp_path / f"{name}.index"), config.corpus, encoder)
        backend = FaissBackend(changed)
        with pytest.raises(ConfigError, match=message):
            await backend.start()
        await backend.close()
