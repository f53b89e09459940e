//! The shape of the workspace, as a test: who may import whom, and which folders stay free of I/O and clocks.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Each crate of the workspace and the crates of the workspace it may name. Benchmarks and tests may use all.
const MAY_USE: &[(&str, &[&str])] = &[
    ("starling-ids", &[]),
    ("ucx-sys", &[]),
    ("starling-kv", &["starling-ids", "ucx-sys"]),
    ("starling-cuda", &["starling-kv"]),
    ("starling-cluster", &["starling-ids"]),
    ("starling-engine", &["starling-ids", "starling-kv"]),
    ("starling-actors", &["starling-ids", "starling-kv", "starling-cluster", "starling-engine"]),
    ("starling-gateway", &["starling-ids", "starling-actors"]),
    ("starling-replay", &["starling-ids", "starling-kv", "starling-engine", "starling-actors"]),
    ("starling-bench-transfer", &["starling-kv"]),
];

/// Folders and files that decide. Files that begin with a line `//! Shell: …` say why they are exempt.
const PURE: &[&str] = &[
    "cluster/ids/src",
    "cluster/src/discovery/record.rs",
    "cluster/src/keys/rules.rs",
    "cluster/src/keys/view.rs",
    "cluster/src/security/ring.rs",
    "cluster/src/program/budget.rs",
    "cluster/src/program/error.rs",
    "cluster/src/program/instances.rs",
    "cluster/src/program/pick.rs",
    "cluster/src/near.rs",
    "cluster/src/stream/baggage.rs",
    "cluster/src/stream/fault.rs",
    "cluster/src/stream/window.rs",
    "cluster/src/wire",
    "kv/src",
    "actors/src/plan",
    "actors/src/route",
    "actors/src/transfer",
    "actors/engine/src/scheduler",
    "actors/engine/src/sampling",
    "actors/engine/src/sidecar/dialect",
    "actors/engine/src/sidecar/flight.rs",
    "actors/engine/src/sidecar/gauges.rs",
    "actors/engine/src/sidecar/inventory.rs",
    "actors/engine/src/sidecar/sse.rs",
    "actors/engine/src/sidecar/words.rs",
    "actors/engine/src/sidecar/zmtp.rs",
    "gateway/src/prompt",
    "gateway/src/text",
    "gateway/src/openai",
    "src/config/layers.rs",
    "src/config/settings.rs",
    "src/control/rows.rs",
];

/// What a pure file must not name, and what it should take instead.
const BANNED: &[(&str, &str)] = &[
    ("tokio::", "return an effect; the shell performs it"),
    ("ractor::", "return an effect; the shell performs it"),
    ("axum::", "return data; the server turns it into a response"),
    ("std::net::Tcp", "return an effect; the shell performs it"),
    ("std::net::Udp", "return an effect; the shell performs it"),
    ("Instant::now", "take `now` as an argument"),
    ("SystemTime::now", "take the time as an argument"),
    ("rand::rng", "take a seed or a generator as an argument"),
    ("thread_rng", "take a seed or a generator as an argument"),
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn workspace_edges() -> BTreeMap<String, BTreeSet<String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo metadata runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("metadata is JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let name = |value: &serde_json::Value| value["name"].as_str().expect("a name").to_owned();
    let members: BTreeSet<String> = packages.iter().map(name).collect();
    let edges = |package: &serde_json::Value| {
        let dependencies = package["dependencies"].as_array().expect("dependencies").iter();
        let normal = dependencies.filter(|dependency| dependency["kind"].is_null());
        normal.map(name).filter(|dependency| members.contains(dependency)).collect()
    };
    packages.iter().map(|package| (name(package), edges(package))).collect()
}

#[test]
fn crates_import_only_what_the_picture_allows() {
    let edges = workspace_edges();
    for (name, allowed) in MAY_USE {
        let used = edges.get(*name).unwrap_or_else(|| panic!("{name} is not in the workspace"));
        let forbidden: Vec<_> = used.iter().filter(|used| !allowed.contains(&used.as_str())).collect();
        assert!(forbidden.is_empty(), "{name} must not depend on {forbidden:?}; it may use {allowed:?}");
    }
    let placed: BTreeSet<&str> =
        MAY_USE.iter().map(|(name, _)| *name).chain(["starling", "starling-bench", "starling-gpu-check"]).collect();
    let strangers: Vec<_> = edges.keys().filter(|name| !placed.contains(name.as_str())).collect();
    assert!(strangers.is_empty(), "crates without a place in the picture: {strangers:?}");
}

#[test]
fn nothing_but_benches_depends_on_the_root() {
    for (name, used) in workspace_edges() {
        let root_used = used.contains("starling") || used.contains("starling-bench");
        assert!(!root_used || name == "starling-bench", "{name} depends on the root package");
    }
}

fn rust_files(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_file() {
        found.push(path.to_owned());
        return;
    }
    for entry in fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).flatten() {
        let path = entry.path();
        if path.is_dir() || path.extension().is_some_and(|extension| extension == "rs") {
            rust_files(&path, found);
        }
    }
}

/// The part of a file before its test module, without comment lines.
fn production(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut tests = false;
    text.lines().enumerate().filter(move |(_, line)| {
        tests |= line.starts_with("mod tests {");
        !tests && !line.trim_start().starts_with("//")
    })
}

#[test]
fn pure_files_import_no_io_no_clock_no_chance() {
    let mut faults = Vec::new();
    let mut looked_at = 0;
    for place in PURE {
        let mut files = Vec::new();
        rust_files(&root().join(place), &mut files);
        for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
            let text = fs::read_to_string(file).expect("source is readable");
            if text.lines().any(|line| line.starts_with("//! Shell:")) {
                continue;
            }
            looked_at += 1;
            for (number, line) in production(&text) {
                for (word, instead) in BANNED.iter().filter(|(word, _)| line.contains(word)) {
                    faults.push(format!("{}:{}: `{word}`: {instead}", file.display(), number + 1));
                }
            }
        }
    }
    assert!(faults.is_empty(), "pure files must stay pure:\n{}", faults.join("\n"));
    assert!(looked_at > 10, "only {looked_at} files were found; has a folder moved?");
}

#[test]
fn every_source_file_says_what_it_is_for() {
    let mut silent = Vec::new();
    for place in ["src", "cluster", "kv", "actors", "gateway", "bench", "tests", "examples"] {
        let mut files = Vec::new();
        rust_files(&root().join(place), &mut files);
        // A `tests.rs` beside its code says what it is for by its name.
        for file in files.into_iter().filter(|file| !file.ends_with("tests.rs")) {
            let text = fs::read_to_string(&file).expect("source is readable");
            if !text.starts_with("//! ") || text.lines().next().is_some_and(|line| line.len() < 20) {
                silent.push(file.display().to_string());
            }
        }
    }
    assert!(silent.is_empty(), "files that do not open with `//!` and a sentence:\n{}", silent.join("\n"));
}
