//! Network namespaces by `ip netns`, deleted with everything in them when their guard is dropped.

use std::{
    io::Write,
    process::{Command, Stdio},
};

/// Every namespace of these tests is called so, with the process and a number behind it.
const PREFIX: &str = "starling-test";

/// A namespace. Dropping it ends the processes in it and deletes it.
#[derive(Debug)]
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    /// A new one; loopback is up, nothing else is there.
    pub(crate) fn new(number: usize) -> Result<Self, String> {
        let name = format!("{PREFIX}-{}-{number}", std::process::id());
        ip(&["netns", "add", &name])?;
        let namespace = Self { name };
        namespace.configure(&["link set lo up"])?;
        Ok(namespace)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs lines of `ip` commands inside.
    pub(crate) fn configure(&self, lines: &[&str]) -> Result<(), String> {
        let mut child = Command::new("ip")
            .args(["-n", &self.name, "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(lines.join("\n").as_bytes()).map_err(|error| error.to_string())?;
        }
        let out = child.wait_with_output().map_err(|error| error.to_string())?;
        if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).trim().to_owned()) }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        delete(&self.name);
    }
}

/// Runs `ip`; its first line of error otherwise.
pub(crate) fn ip(args: &[&str]) -> Result<String, String> {
    let out = Command::new("ip").args(args).stdin(Stdio::null()).output().map_err(|error| format!("ip: {error}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let error = String::from_utf8_lossy(&out.stderr);
    Err(format!("ip {}: {}", args.join(" "), error.lines().next().unwrap_or_default()))
}

/// Deletes what test processes that are gone have left behind.
pub(crate) fn sweep() {
    let Ok(listed) = ip(&["netns", "list"]) else { return };
    for name in listed.lines().filter_map(|line| line.split(' ').next()) {
        let Some(owner) = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').nth(1)) else { continue };
        if !std::path::Path::new("/proc").join(owner).exists() {
            delete(name);
        }
    }
}

/// Ends the processes in a namespace and deletes it.
fn delete(name: &str) {
    let inside = ip(&["netns", "pids", name]).unwrap_or_default();
    let pids: Vec<&str> = inside.split_whitespace().collect();
    if !pids.is_empty() {
        let killed = Command::new("kill").arg("-KILL").args(&pids).status();
        eprintln!("{name}: ended {pids:?}: {killed:?}");
    }
    if let Err(error) = ip(&["netns", "delete", name]) {
        eprintln!("{error}");
    }
}
