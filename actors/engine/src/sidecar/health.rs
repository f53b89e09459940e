//! Whether the server can be asked, and how busy it is: looked at every second, and at once when a call failed.
//!
//! A task of the io thread. A server that nobody listens for is away at once; one that is silent or says that it is not well, after
//! [`FAILURES_MAX`] looks in a row. When it comes up it is asked what it calls its model, how long a prompt may be, and how it cuts
//! a text: one with another tokenizer than the model's own is not used. Never: gives up.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use starling_ids::{Metric, TokenId};
use tokio::time::timeout;

use super::{
    Dialect,
    dialect::tokenize,
    gauges,
    http::Failure,
    io::{Facts, News, Outlet, Shared},
    words::PROBE,
};

/// Between two looks.
const EVERY: Duration = Duration::from_secs(1);
/// Between two looks at a server that is away.
const EVERY_AWAY: Duration = Duration::from_millis(500);
/// How long an answer may take.
const WITHIN: Duration = Duration::from_secs(3);
/// Looks in a row that may fail otherwise than by a refused connection.
const FAILURES_MAX: u32 = 3;
/// Between two lines of the log about a server that is away.
const SAY_EVERY: u32 = 60;

/// Why it cannot be asked.
enum Ill {
    /// Nobody listens, or it is another server than it should be.
    Away(String),
    /// It is silent or not well, which may pass.
    Doubtful(String),
}

/// Looks after it until the runtime ends.
pub(super) async fn watch(shared: Arc<Shared>, outlet: Outlet) {
    let (mut up, mut failures, mut away_for) = (false, 0, 0u32);
    loop {
        let looked = match look(&shared).await {
            Ok(()) if !up => introduce(&shared).await.map(Some).map_err(Ill::Away),
            Ok(()) => Ok(None),
            Err(ill) => Err(ill),
        };
        let gauge = metrics::gauge!(Metric::EngineUp.name(), "engine" => shared.dialect.label());
        match looked {
            Ok(facts) => {
                (failures, away_for) = (0, 0);
                // First its size, which it has for as long as it is up.
                if let Some(load) = load(&shared).await {
                    outlet.send(News::Load(load)).await;
                }
                if let Some(facts) = facts {
                    tracing::info!(engine = %shared.dialect, url = %shared.server.place(), model = ?facts.model, "the engine is up");
                    up = true;
                    gauge.set(1.0);
                    outlet.send(News::Up(facts)).await;
                }
            }
            Err(Ill::Doubtful(_)) if up && failures + 1 < FAILURES_MAX => failures += 1,
            Err(Ill::Away(why) | Ill::Doubtful(why)) => {
                if std::mem::take(&mut up) || away_for.is_multiple_of(SAY_EVERY) {
                    tracing::warn!(engine = %shared.dialect, url = %shared.server.place(), why, "the engine is away");
                }
                gauge.set(0.0);
                (failures, away_for) = (0, away_for.wrapping_add(1));
                outlet.send(News::Away(format!("{} at {}: {why}", shared.dialect, shared.server.place()))).await;
            }
        }
        let pause = if up { EVERY } else { EVERY_AWAY };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.doubt.notified(), if up => {}
        }
    }
}

async fn look(shared: &Shared) -> Result<(), Ill> {
    let path = if shared.dialect == Dialect::OpenAi { "/v1/models" } else { "/health" };
    match shared.server.get(path, WITHIN).await {
        Ok((200, _)) => Ok(()),
        Ok((status @ (401 | 403), _)) => Err(Ill::Away(format!("{path} gives status {status}: is the key right?"))),
        Ok((status, _)) => Err(Ill::Doubtful(format!("{path} gives status {status}"))),
        Err(failure @ Failure::Connect(_)) => Err(Ill::Away(failure.to_string())),
        Err(failure) => Err(Ill::Doubtful(failure.to_string())),
    }
}

/// What it says of itself. An error says why it is not used.
async fn introduce(shared: &Shared) -> Result<Facts, String> {
    let facts = match shared.dialect {
        Dialect::Vllm | Dialect::OpenAi => {
            let models = ask(shared, "/v1/models").await.ok_or("/v1/models cannot be read; is the key right?")?;
            let list = models["data"].as_array().map(Vec::as_slice).unwrap_or_default();
            // Adapters are listed behind the model whose children they are.
            let own = list.iter().find(|model| model["parent"].is_null()).ok_or("/v1/models lists no model")?;
            Facts { model: own["id"].as_str().map(str::to_owned), context: number(&own["max_model_len"]) }
        }
        Dialect::LlamaCpp => {
            let props = ask(shared, "/props").await.unwrap_or_default();
            Facts { model: None, context: number(&props["default_generation_settings"]["n_ctx"]) }
        }
        Dialect::Sglang => Facts::default(),
    };
    match their_tokens(shared, facts.model.as_deref()).await {
        Some(theirs) if theirs != shared.words.tokens(PROBE)? => {
            Err("its tokenizer cuts a text otherwise than that of --model: is it the same model?".to_owned())
        }
        _ => Ok(facts),
    }
}

async fn ask(shared: &Shared, path: &str) -> Option<Value> {
    let (status, body) = shared.server.get(path, WITHIN).await.ok()?;
    if status == 200 { serde_json::from_slice(&body).ok() } else { None }
}

/// How the server cuts the probe; `None` of one that does not say.
async fn their_tokens(shared: &Shared, model: Option<&str>) -> Option<Vec<TokenId>> {
    let call = tokenize(shared.dialect, model, PROBE)?;
    let all = async {
        let answer = shared.server.post(call.path, &call.body).await.ok()?;
        if answer.status() == 200 { answer.rest().await.ok() } else { None }
    };
    let body = timeout(WITHIN, all).await.ok()??;
    let value: Value = serde_json::from_slice(&body).ok()?;
    serde_json::from_value(value.get("tokens")?.clone()).ok()
}

/// Its own account; `None` of one that keeps none.
async fn load(shared: &Shared) -> Option<gauges::ServerLoad> {
    if shared.dialect == Dialect::OpenAi {
        return None;
    }
    let (status, body) = shared.server.get("/metrics", WITHIN).await.ok()?;
    (status == 200).then(|| gauges::read(&String::from_utf8_lossy(&body)))
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().map(|number| u32::try_from(number).unwrap_or(u32::MAX))
}
