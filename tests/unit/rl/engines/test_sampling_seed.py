import hashlib

from posttrain.rl.engines.sampling_seed import sampling_seed


def test_the_seed_is_the_hash_of_the_responses_name():
    digest = hashlib.sha256(b"[42, 3, 17, 5]").digest()
    assert sampling_seed(42, 3, 17, 5) == int.from_bytes(digest[:4], "big") // 2


def test_every_part_of_the_name_counts():
    names = [
        (1, 2, 3, 4),
        (2, 2, 3, 4),
        (1, 3, 3, 4),
        (1, 2, 4, 4),
        (1, 2, 3, 5),
        (1, "2", 3, 4),
        (1, 23, 4, 4),
    ]
    assert len({sampling_seed(*name) for name in names}) == len(names)


def test_seeds_fit_sglang_and_do_not_collide_within_a_step():
    seeds = [sampling_seed(0, 0, prompt, sample) for prompt in range(64) for sample in range(16)]
    assert min(seeds) >= 0
    assert max(seeds) < 2**31
    assert len(set(seeds)) == len(seeds)
