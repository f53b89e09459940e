//! Tells a program of the operator's how many workers are wanted: it starts and stops them.
//!
//! The program is started for each order, without a shell and without arguments, with the environment of the node. One JSON
//! document comes on its standard input, which then ends. It should bring the number of workers to what is wanted, or make
//! whoever does so know, and end with 0; what it writes to standard error goes to the log. The same order may come again.
//! Called by the planner, one at a time. Bounds: [`Hook::limit`], after which it is killed; [`SAID_MAX`] bytes of what it says.

use std::{path::PathBuf, process::Stdio, time::Duration};

use serde::Serialize;
use starling_ids::{ModelId, NodeId};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
    time::timeout,
};

use crate::{
    plan::{Action, Decision, Fleet, Observation},
    route::split::Role,
};

/// Version of the document. A field is only ever added; what has another meaning gets another number.
pub const VERSION: u32 = 1;

/// Bytes of standard error that are logged.
pub const SAID_MAX: u64 = 16 * 1024;

/// How long a program that has ended is still listened to.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A program, and how long it may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// The program.
    pub path: PathBuf,
    /// Longest time it may run.
    pub limit: Duration,
}

/// One document; see [`Order::json`].
#[derive(Debug, Clone, Serialize)]
pub(super) struct Order {
    version: u32,
    id: String,
    model: String,
    leader: String,
    reason: String,
    roles: Vec<Count>,
    remove: Vec<String>,
    workers: Vec<Present>,
    #[serde(skip)]
    runs: bool,
}

#[derive(Debug, Clone, Serialize)]
struct Count {
    role: Role,
    now: u32,
    wanted: u32,
}

#[derive(Debug, Clone, Serialize)]
struct Present {
    worker: String,
    role: Role,
    sound: bool,
}

impl Order {
    /// What a decision to have another number of workers asks for.
    pub(super) fn new(
        model: &ModelId,
        leader: &NodeId,
        decision: &Decision,
        observation: &Observation,
        number: u64,
    ) -> Self {
        let now = Fleet::of_all(&observation.workers);
        let (wanted, remove) = match &decision.action {
            Action::Scale { wanted, remove } => (*wanted, remove.as_slice()),
            _ => (now, &[][..]),
        };
        let count = |role: Role| Count { role, now: now.count(role), wanted: wanted.count(role) };
        let present = observation.workers.iter();
        let present =
            present.map(|one| Present { worker: one.id.to_string(), role: one.role, sound: one.sound }).collect();
        Self {
            version: VERSION,
            id: format!("{leader}-{number}"),
            model: model.to_string(),
            leader: leader.to_string(),
            reason: decision.reason.clone(),
            roles: [Role::Both, Role::Prefill, Role::Decode].map(count).into(),
            remove: remove.iter().map(ToString::to_string).collect(),
            workers: present,
            runs: false,
        }
    }

    /// It is being carried out.
    pub(super) fn begin(&mut self) {
        self.runs = true;
    }

    /// Whether it is.
    pub(super) fn runs(&self) -> bool {
        self.runs
    }

    /// The document:
    ///
    /// | field | what |
    /// |---|---|
    /// | `version` | [`VERSION`] |
    /// | `id` | another text for every order of one leader's life |
    /// | `model`, `leader` | the model, and the node that decided |
    /// | `reason` | why, for people |
    /// | `roles` | for `both`, `prefill` and `decode`: `now` workers that take requests, `wanted` that should |
    /// | `remove` | workers that were drained for this order, `NODE/INDEX`: stop these, each is its process's only one |
    /// | `workers` | those that take requests: `worker`, `role`, `sound` (whether it is heard and works) |
    pub(super) fn json(&self) -> Result<String, String> {
        serde_json::to_string(self).map_err(|error| error.to_string())
    }
}

impl Hook {
    /// Runs the program once with a document.
    pub(super) async fn run(&self, document: Result<String, String>) -> Result<(), String> {
        let document = document?;
        let path = self.path.display();
        let mut command = Command::new(&self.path);
        // Killed when this future is dropped: with the planner, or when its time is over.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().map_err(|error| format!("{path} does not start: {error}"))?;
        let ended = timeout(self.limit, talk(child, &document)).await;
        let (code, said) = ended.map_err(|_| format!("{path} has not ended within {} s", self.limit.as_secs()))??;
        for line in said.lines().filter(|line| !line.trim().is_empty()) {
            tracing::info!(hook = %path, "{line}");
        }
        let last = || said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing").to_owned();
        match code {
            Some(0) => Ok(()),
            Some(code) => Err(format!("{path} ended with {code}, saying: {}", last())),
            None => Err(format!("{path} was killed by a signal")),
        }
    }
}

/// Gives a program its document; how it ended, and what it said.
async fn talk(mut child: Child, document: &str) -> Result<(Option<i32>, String), String> {
    let (input, errors) = (child.stdin.take(), child.stderr.take());
    let write = async {
        if let Some(mut input) = input {
            // A program that does not read knows what it does: its exit code counts.
            input.write_all(document.as_bytes()).await.ok();
            input.write_all(b"\n").await.ok();
        }
    };
    let mut said = Vec::new();
    let ends = async {
        let reading = async {
            if let Some(mut errors) = errors {
                (&mut errors).take(SAID_MAX).read_to_end(&mut said).await.ok();
                // What is more is not kept, and must not stop it.
                tokio::io::copy(&mut errors, &mut tokio::io::sink()).await.ok();
            }
        };
        tokio::pin!(reading);
        let mut all_read = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status,
                () = &mut reading, if !all_read => all_read = true,
            }
        };
        if !all_read {
            // What it started may hold its standard error open for ever.
            timeout(LAST_WORDS, &mut reading).await.ok();
        }
        status
    };
    let ((), status) = tokio::join!(write, ends);
    let code = status.map_err(|error| error.to_string())?.code();
    Ok((code, String::from_utf8_lossy(&said).into_owned()))
}
