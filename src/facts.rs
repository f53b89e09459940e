//! What a node says when it is ready: one line for scripts, a few for people. Pure.

use std::net::SocketAddr;

use starling_ids::NodeId;

use crate::config::Roles;

/// What runs.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The node's name.
    pub name: NodeId,
    /// Where others dial it.
    pub address: SocketAddr,
    /// Where HTTP listens.
    pub http: Option<SocketAddr>,
    /// The parts it runs.
    pub roles: Roles,
    /// The served name of its model, when it has workers.
    pub model: Option<String>,
    /// Its workers.
    pub workers: u16,
    /// The program as it was called, so that lines to paste work.
    pub program: String,
    /// How to name the key file to a person.
    pub key_file: String,
    /// `starling join` on this machine finds the key by itself.
    pub key_is_default: bool,
}

impl Facts {
    /// The line that scripts wait for: `ready name=… node=… http=… model=… workers=…`, `-` for what is not there.
    ///
    /// A model's name may hold spaces; it is then in double quotes, as JSON writes a string.
    #[must_use]
    pub fn ready_line(&self) -> String {
        let http = self.http.map_or_else(|| "-".to_owned(), |http| http.to_string());
        let model = self.model.as_deref().unwrap_or("-");
        let quoted = model.contains([' ', '"']).then(|| serde_json::Value::from(model).to_string());
        let model = quoted.as_deref().unwrap_or(model);
        format!("ready name={} node={} http={http} model={model} workers={}", self.name, self.address, self.workers)
    }

    /// What runs here and what to type next.
    #[must_use]
    pub fn banner(&self) -> String {
        // Without the default folder `join` does not find the key by itself.
        let key = if self.key_is_default { String::new() } else { format!(" --key-file {}", self.key_file) };
        let mut lines = vec![format!("starling {} · node {}", env!("CARGO_PKG_VERSION"), self.name)];
        lines.push(format!("  runs      {}", self.parts().join(", ")));
        if let Some(model) = &self.model {
            lines.push(format!("  model     {model}"));
        }
        lines.push(format!("  cluster   {}   key {}", self.address, self.key_file));
        if let (Some(http), true) = (self.http, self.roles.gateway) {
            let base = format!("http://{}", dialled(http));
            lines.push(format!("  API       {base}/v1   (OpenAI), metrics at {base}/metrics"));
            lines.push(format!("  page      {base}/ui"));
            lines.push("\nTry it:".to_owned());
            lines.push(self.curl(&base));
            lines.push(format!("  {} chat", self.program));
        }
        lines.push(format!("\nAdd a worker:\n  {} join {}{key}\n", self.program, self.address));
        lines.join("\n")
    }

    fn parts(&self) -> Vec<String> {
        let mut parts = Vec::new();
        if self.roles.gateway {
            parts.push("gateway".to_owned());
        }
        if self.roles.router {
            parts.push("router".to_owned());
        }
        match self.workers {
            0 => {}
            1 => parts.push("1 worker".to_owned()),
            n => parts.push(format!("{n} workers")),
        }
        parts
    }

    /// A line that works when pasted into a shell, whatever the model is called.
    fn curl(&self, base: &str) -> String {
        let body = serde_json::json!({
            "model": self.model.as_deref().unwrap_or("MODEL"),
            "stream": true,
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        });
        let body = body.to_string().replace('\'', "'\\''");
        format!("  curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    }
}

/// The address to dial for a listener; an unspecified one is reached by loopback.
fn dialled(listening: SocketAddr) -> SocketAddr {
    let mut address = listening;
    match listening {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => address.set_ip([127, 0, 0, 1].into()),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => address.set_ip(std::net::Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(model: Option<&str>) -> Facts {
        Facts {
            name: NodeId::new("one").unwrap(),
            address: "127.0.0.1:7400".parse().unwrap(),
            http: Some("0.0.0.0:8000".parse().unwrap()),
            roles: Roles { worker: true, router: true, gateway: true },
            model: model.map(str::to_owned),
            workers: 2,
            program: "target/release/starling".into(),
            key_file: "/k".into(),
            key_is_default: false,
        }
    }

    #[test]
    fn the_ready_line_is_what_scripts_were_promised() {
        let line = facts(Some("SmolLM2")).ready_line();
        assert_eq!(line, "ready name=one node=127.0.0.1:7400 http=0.0.0.0:8000 model=SmolLM2 workers=2");
        assert!(facts(Some("a \"b")).ready_line().contains("model=\"a \\\"b\" workers"));
        assert!(facts(None).ready_line().contains("model=- "));
    }

    #[test]
    fn the_curl_line_survives_a_shell() {
        let banner = facts(Some("it's")).banner();
        assert!(banner.contains("http://127.0.0.1:8000/v1/chat/completions"), "{banner}");
        assert!(banner.contains("it'\\''s"), "{banner}");
        assert!(banner.contains("target/release/starling join 127.0.0.1:7400 --key-file /k"), "{banner}");
    }
}
