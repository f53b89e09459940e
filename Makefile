# `make up` builds everything and starts a node; `make test` runs every test. The rest is for people who change it.
.PHONY: up test miri model bench lint fmt doc ci help

help:           ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

up:             ## build, bring the model, start a node; ARGS="--http 0.0.0.0:8000" goes to `starling up`
	@scripts/up.sh $(ARGS)

test:           ## every test, the openai SDK included
	@scripts/test.sh

miri:           ## the block pool and the layouts under Miri, about four minutes; needs `rustup +nightly component add miri rust-src`
	PROPTEST_CASES=4 MIRIFLAGS=-Zmiri-disable-isolation \
		cargo +nightly miri test -p starling-kv --lib --target-dir target/miri -- pool:: layout::

model:          ## bring the default model and print its path
	@scripts/model.sh

bench:          ## the benchmarks; their figures are recorded in bench/RESULTS.md
	cargo run --release --locked -p starling-bench -- $(ARGS)

lint:           ## formatting, lints, sizes: nothing is written
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	scripts/size.sh

fmt:            ## format
	cargo fmt --all

doc:            ## build the documentation, warnings are errors
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps

ci:             ## what continuous integration runs
	bash .ci/run
