//! `starling chat`: talk to the model in the terminal, through the gateway like any client.

use std::{
    io::{IsTerminal, Write},
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Args;
use futures::StreamExt;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Failure, inspect::local_node, sse::EventLines};

const EXAMPLES: &str = "\
Examples:
  starling chat
  starling chat -m 'Write a haiku about gossip.' --temperature 0.7 --stats
  git diff | starling chat --system 'Summarise this change in one sentence.'
  starling chat --url http://10.0.0.5:8000 --model my-model

Keys: Ctrl-C ends the answer and keeps the conversation, Ctrl-D ends the program.
Without -m and without a terminal the whole standard input is one message.

Exit codes: 0 done, 1 the gateway refused or failed, 3 no gateway answered.";

/// Chat with the model; the answer appears as it is computed.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Chat {
    /// Ask this and end, instead of a conversation
    #[arg(short, long, value_name = "TEXT")]
    message: Option<String>,
    /// A system message before the first one
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// 0 always takes the likeliest token, 2 is wild
    #[arg(long, value_name = "0..2")]
    temperature: Option<f32>,
    /// Longest answer in tokens
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_tokens: u32,
    /// Which model [default: the first that the gateway lists]
    #[arg(long)]
    model: Option<String>,
    /// The gateway [default: the one of the node that runs here]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Key for a gateway that asks for one
    #[arg(long, value_name = "KEY", env = "STARLING_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Data folder of the node that runs here
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Print time to first token, tokens and tokens per second after each answer, on standard error
    #[arg(long)]
    stats: bool,
}

/// How one answer ended.
enum Answer {
    Whole(String),
    Stopped(String),
}

/// A conversation with one model at one gateway.
struct Session {
    http: reqwest::Client,
    url: String,
    model: String,
    messages: Vec<Value>,
    options: Chat,
}

impl Chat {
    pub(super) async fn run(self) -> Result<(), Failure> {
        let piped = self.message.is_none() && !std::io::stdin().is_terminal();
        let message = match &self.message {
            Some(text) => Some(text.clone()),
            None if piped => Some(std::io::read_to_string(std::io::stdin()).map_err(Failure::failed)?),
            None => None,
        };
        if message.as_ref().is_some_and(|text| text.trim().is_empty()) {
            return Err(Failure::Usage("the message is empty".to_owned()));
        }
        let mut session = Session::open(self).await?;
        match message {
            Some(text) if piped => session.ask(text.trim()).await,
            Some(text) => session.ask(&text).await,
            None => session.converse().await,
        }
    }

    fn url(&self) -> Result<String, Failure> {
        if let Some(url) = &self.url {
            return Ok(base_url(url));
        }
        let node = local_node(self.data_dir.clone())?;
        let http = node.http.ok_or_else(|| {
            Failure::NoNode(format!(
                "node {} has no gateway: give --url, or --data-dir of a node that has one",
                node.name
            ))
        })?;
        Ok(format!("http://{http}"))
    }

    /// The key as a header that is never logged; no header without a key.
    fn credentials(&self) -> Result<HeaderMap, Failure> {
        let mut headers = HeaderMap::new();
        if let Some(key) = &self.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {key}"));
            let mut value = value.map_err(|_| Failure::Usage("--api-key: visible ASCII characters only".to_owned()))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        Ok(headers)
    }
}

/// The gateway's address without `/v1`; without a scheme it is http.
fn base_url(text: &str) -> String {
    let text = text.trim().trim_end_matches('/').trim_end_matches("/v1").trim_end_matches('/');
    if text.contains("://") { text.to_owned() } else { format!("http://{text}") }
}

impl Session {
    async fn open(options: Chat) -> Result<Self, Failure> {
        let url = options.url()?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(Duration::from_secs(5))
            .default_headers(options.credentials()?)
            .build()
            .map_err(Failure::failed)?;
        let model = match &options.model {
            Some(model) => model.clone(),
            None => first_model(&http, &url).await?,
        };
        let messages = options.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
        Ok(Self { http, url, model, messages, options })
    }

    async fn converse(&mut self) -> Result<(), Failure> {
        eprintln!("{} at {}. Ctrl-C ends an answer, Ctrl-D ends the chat.", self.model, self.url);
        while let Some(text) = prompt().await? {
            if text.trim().is_empty() {
                continue;
            }
            // A refusal (too long, say) is no reason to lose the conversation.
            if let Err(failure) = self.ask(text.trim()).await {
                eprintln!("{failure}");
                self.messages.pop();
            }
        }
        eprintln!();
        Ok(())
    }

    /// One message and its answer, both kept.
    async fn ask(&mut self, text: &str) -> Result<(), Failure> {
        self.messages.push(json!({"role": "user", "content": text}));
        let mut body = json!({
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.options.max_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if let Some(temperature) = self.options.temperature {
            body["temperature"] = json!(temperature);
        }
        let answer = self.stream(&body).await?;
        let (Answer::Whole(text) | Answer::Stopped(text)) = answer;
        self.messages.push(json!({"role": "assistant", "content": text}));
        Ok(())
    }

    /// Prints the answer as it comes. Dropping the response on Ctrl-C cancels it at the worker.
    async fn stream(&self, body: &Value) -> Result<Answer, Failure> {
        let begun = Instant::now();
        let request = self.http.post(format!("{}/v1/chat/completions", self.url)).json(body).send();
        let response = request.await.map_err(|e| Failure::NoNode(format!("{}: {}", self.url, plain(&e))))?;
        if !response.status().is_success() {
            return Err(refusal(response).await);
        }
        let mut events = EventLines::default();
        let mut text = String::new();
        let mut stats = Stats { begun, first: None, prompt: 0, tokens: 0 };
        let mut chunks = response.bytes_stream();
        loop {
            let chunk = tokio::select! {
                _ = tokio::signal::ctrl_c() => {
                    println!();
                    return Ok(Answer::Stopped(text));
                }
                chunk = chunks.next() => chunk,
            };
            let Some(chunk) = chunk else { return Err(Failure::failed("the stream broke off before its end")) };
            let chunk = chunk.map_err(|e| Failure::Failed(format!("the stream broke off: {}", plain(&e))))?;
            for data in events.push(&chunk) {
                if data == "[DONE]" {
                    println!();
                    stats.print(self.options.stats);
                    return Ok(Answer::Whole(text));
                }
                self.show(&data, &mut text, &mut stats)?;
            }
        }
    }

    /// Prints the text of one event.
    fn show(&self, data: &str, text: &mut String, stats: &mut Stats) -> Result<(), Failure> {
        let event: Event = serde_json::from_str(data).map_err(|e| Failure::Failed(format!("{e}: {data}")))?;
        if let Some(error) = event.error {
            println!();
            return Err(Failure::Failed(error.message));
        }
        if let Some(usage) = event.usage {
            (stats.prompt, stats.tokens) = (usage.prompt_tokens, usage.completion_tokens);
        }
        for choice in event.choices {
            let Some(new) = choice.delta.content.filter(|new| !new.is_empty()) else { continue };
            stats.first.get_or_insert_with(Instant::now);
            text.push_str(&new);
            print!("{new}");
        }
        std::io::stdout().flush().map_err(Failure::failed)
    }
}

#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Delta,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

#[derive(Deserialize)]
struct ErrorBody {
    message: String,
}

struct Stats {
    begun: Instant,
    first: Option<Instant>,
    prompt: u64,
    tokens: u64,
}

impl Stats {
    fn print(&self, wanted: bool) {
        let (true, Some(first)) = (wanted, self.first) else { return };
        let wait = first.duration_since(self.begun).as_millis();
        // The first token ends the wait; the rate is that of the tokens after it.
        let secs = first.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^52")]
        let rate = if secs > 0.0 { self.tokens.saturating_sub(1) as f64 / secs } else { 0.0 };
        eprintln!(
            "prompt {} tokens, first token {wait} ms, answer {} tokens, {rate:.1} tokens/s",
            self.prompt, self.tokens
        );
    }
}

/// One line from the terminal; `None` at Ctrl-D. Ctrl-C gives a new prompt.
async fn prompt() -> Result<Option<String>, Failure> {
    // The terminal can only be read by a thread that blocks; the read goes on while Ctrl-C is answered.
    let mut line = tokio::task::spawn_blocking(|| {
        let mut text = String::new();
        std::io::stdin().read_line(&mut text).map(|bytes| (bytes > 0).then_some(text))
    });
    loop {
        eprint!("> ");
        std::io::stderr().flush().map_err(Failure::failed)?;
        tokio::select! {
            _ = tokio::signal::ctrl_c() => eprintln!("  (Ctrl-D ends)"),
            line = &mut line => return line.map_err(Failure::failed)?.map_err(Failure::failed),
        }
    }
}

async fn first_model(http: &reqwest::Client, url: &str) -> Result<String, Failure> {
    let response = http.get(format!("{url}/v1/models")).timeout(Duration::from_secs(10)).send().await;
    let response = response.map_err(|e| Failure::NoNode(format!("{url}: {}", plain(&e))))?;
    if !response.status().is_success() {
        return Err(refusal(response).await);
    }
    let list: Value = response.json().await.map_err(|e| Failure::Failed(plain(&e)))?;
    let first = list["data"][0]["id"].as_str().map(str::to_owned);
    first.ok_or_else(|| Failure::failed("the gateway serves no model yet: no worker is ready"))
}

/// The message of an error answer.
async fn refusal(response: reqwest::Response) -> Failure {
    let status = response.status();
    let body: Value = response.json().await.unwrap_or_default();
    Failure::Failed(body["error"]["message"].as_str().map_or_else(|| status.to_string(), str::to_owned))
}

/// A transport error with its cause, in one line.
fn plain(error: &reqwest::Error) -> String {
    use std::error::Error;
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_is_found_however_its_address_is_written() {
        for text in ["127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", " 127.0.0.1:8000/v1/ "] {
            assert_eq!(base_url(text), "http://127.0.0.1:8000");
        }
        assert_eq!(base_url("https://models.example/v1"), "https://models.example");
    }
}
