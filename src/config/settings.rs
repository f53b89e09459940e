//! The one table of settings: each row is a flag, an environment variable and a key of the configuration file.
//!
//! Called by the command line (flags and help) and by [`super::layers`] (files and variables).
//! Never: reads anything. Adding a row here and a field in [`super::Config`] is all a new setting takes.

/// One setting. Its flag is `--name`, its file key `name`, its variable `STARLING_NAME` (`-` becomes `_`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Lower-case words joined by `-`.
    pub name: &'static str,
    /// How its value is written in help: `ADDR`, `N`.
    pub value: &'static str,
    /// Default of `starling up`. Text in angle brackets says how it is derived at start.
    pub up: &'static str,
    /// Default of `starling join`.
    pub join: &'static str,
    /// The first line of its help: what it is, its unit.
    pub help: &'static str,
    /// What a value must be; also the text of the error about a wrong one.
    pub rule: &'static str,
}

impl Setting {
    /// The environment variable.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("STARLING_{}", self.name.to_uppercase().replace('-', "_"))
    }

    /// The default of a verb, or `None` when it is derived at start.
    #[must_use]
    pub fn default_value(&self, join: bool) -> Option<&'static str> {
        let text = if join { self.join } else { self.up };
        (!text.starts_with('<')).then_some(text)
    }
}

macro_rules! settings {
    ($($name:literal $value:literal up $up:literal join $join:literal $help:literal $rule:literal)*) => {
        /// Every setting, in the order of the help.
        pub const SETTINGS: &[Setting] = &[
            $(Setting { name: $name, value: $value, up: $up, join: $join, help: $help, rule: $rule }),*
        ];
    };
}

settings! {
    "name" "NAME" up "<the host name>" join "<the host name and four letters, kept in the data folder>"
        "Stable name of this node in the cluster"
        "1 to 48 of a-z 0-9 . _ - starting with a letter or digit"
    "role" "ROLE" up "all" join "worker"
        "What this node does: worker, router, gateway or all; several joined by commas or by repeating the flag"
        "one or more of worker, router, gateway, all"
    "bind" "ADDR" up "127.0.0.1:7400" join "<the address this machine has towards the first seed, any free port>"
        "Address for the cluster: gossip (UDP) and links (TCP) on the same port; port 0 takes a free one"
        "an address with a port, for example 10.0.0.5:7400"
    "advertise" "ADDR" up "<the bind address>" join "<the bind address>"
        "Address that other nodes use to reach this one, when it is not the bind address; port 0 means the bound port"
        "an address with a port that is not 0.0.0.0 or [::]"
    "http" "ADDR" up "127.0.0.1:8000" join "<127.0.0.1 and any free port with the role gateway, else none>"
        "Address of the HTTP server: the OpenAI API with the role gateway; /health, /live and /metrics with any role"
        "an address with a port, for example 0.0.0.0:8000, or none"
    "model" "PATH" up "<SmolLM2-135M-Instruct in the cache folder>" join "<SmolLM2-135M-Instruct in the cache folder>"
        "Model of the embedded engine: a GGUF file or a Hugging Face folder with safetensors, Llama architecture; for an engine in another process its tokenizer, which needs no weights"
        "a path to a .gguf file or to a folder"
    "served-name" "NAME" up "<from the model file>" join "<from the model file>"
        "Name that clients put in the field `model`"
        "1 to 256 bytes, no control characters, no space at either end"
    "engine" "KIND" up "embedded" join "embedded"
        "embedded computes the model on this machine's processor; simulated keeps its timing and makes up the text; the others front a server at engine-url that runs already, openai being any that completes text"
        "embedded, simulated, vllm, sglang, llama.cpp or openai"
    "engine-url" "URL" up "<none>" join "<none>"
        "HTTP address of the server behind an engine of kind vllm, sglang, llama.cpp or openai"
        "an address such as http://127.0.0.1:8001, without https, query and password"
    "engine-events" "ENDPOINT" up "<none: routers guess what the server has cached>" join "<none: routers guess what the server has cached>"
        "ZeroMQ address where vLLM or SGLang publishes its KV events"
        "an address such as tcp://127.0.0.1:5557"
    "engine-replay" "ENDPOINT" up "<none: after a gap the server's blocks are forgotten>" join "<none: after a gap the server's blocks are forgotten>"
        "ZeroMQ address where vLLM or SGLang sends KV events again that were lost"
        "an address such as tcp://127.0.0.1:5558"
    "engine-key-file" "FILE" up "<none>" join "<none>"
        "File with the key that the server at engine-url wants as `Authorization: Bearer KEY`"
        "a path to a file with one key"
    "workers" "N" up "2" join "1"
        "Workers in this process; they share the weights, each has its own KV memory; one in front of a server"
        "a whole number from 1 to 64"
    "worker-role" "ROLE" up "both" join "both"
        "What the workers of this process are for: prefill computes prompts for others, decode answers and has long prompts computed by them"
        "prefill, decode or both"
    "kv-events" "WORD" up "on" join "on"
        "Whether workers tell routers of every block that they store or lose; off: routers guess, from what they gave where, for 2 minutes"
        "on or off"
    "adapters" "NAMES" up "<none>" join "<none>"
        "LoRA adapters that the simulated engine says it has, joined by commas; requests ask for one with x-starling-adapter"
        "1 to 64 names of 1 to 128 visible ASCII characters, without commas"
    "fault" "FAULT" up "none" join "none"
        "A fault on command of the simulated engine, for tests: hang, crash, slow=FACTOR, reject, wrong-events or say=IDS; see `starling fault`"
        "none, hang, crash, slow=FACTOR with a factor above 1 and at most 1000, reject, wrong-events or say=ID,ID with 1 to 1024 ids of tokens"
    "threads" "N" up "0" join "0"
        "Threads that compute, shared by all workers of the process; 0 takes one per core"
        "a whole number from 0 to 1024"
    "kv-mib" "MIB" up "256" join "256"
        "KV memory of each worker in MiB"
        "a whole number from 8 to 1048576"
    "kv-host" "BYTES" up "0" join "0"
        "Memory of each worker for KV blocks that leave its pool; they come back when that is sooner than computing them"
        "a number of bytes; KiB, MiB, GiB or TiB may follow, for example 2GiB; 0 for none"
    "kv-disk" "DIR" up "<none>" join "<none>"
        "Folder on a local disk for KV blocks that leave the memory tiers; they outlive the process"
        "a path to a folder that can be written"
    "kv-disk-size" "BYTES" up "16GiB" join "16GiB"
        "Bytes of KV blocks that each worker keeps below kv-disk"
        "a number of bytes, at least 1MiB; KiB, MiB, GiB or TiB may follow, for example 100GiB"
    "kv-transport" "WAY" up "auto" join "auto"
        "How KV blocks move between processes; auto measures the ways there are and keeps the fastest"
        "auto, shm, ucx or tcp"
    "ucx-lib" "FILE" up "<the system's>" join "<the system's>"
        "UCX's libucp.so.0 to load, its other libraries beside it"
        "a path to libucp.so.0"
    "kernel" "KIND" up "auto" join "auto"
        "Inner loops of the embedded engine; all give the same bits, auto takes the fastest this processor has"
        "auto, avx512, avx2 or portable"
    "activations" "KIND" up "int16" join "int16"
        "Rounding inside the embedded engine: int16 answers as unrounded arithmetic does, int8 is faster and turns at close calls"
        "int8 or int16"
    "sequences-max" "N" up "16" join "16"
        "Sequences that one worker decodes together"
        "a whole number from 1 to 1024"
    "waiting-max" "N" up "256" join "256"
        "Sequences that may wait at one worker; one more is refused with 503 and Retry-After"
        "a whole number from 1 to 65536"
    "batch-tokens-max" "N" up "512" join "512"
        "Tokens that one engine step computes, prompts and answers together"
        "a whole number from 16 to 65536"
    "drain-secs" "SECS" up "30" join "30"
        "Seconds that requests in flight get to finish after Ctrl-C or SIGTERM"
        "a whole number from 0 to 86400"
    "data-dir" "DIR" up "<XDG_DATA_HOME/starling>" join "<XDG_DATA_HOME/starling/nodes/NAME>"
        "Folder for what outlives the process: the boot counter, the key, and node.json while it runs"
        "a path to a folder that can be written"
    "key-file" "FILE" up "<cluster.key in the data folder, made on first start>" join "<the key of `starling up` on this machine>"
        "File with the cluster key, mode 0600; every node of a cluster has the same one"
        "a path to a key file"
    "policy" "POLICY" up "starling" join "starling"
        "How the router of this node chooses workers; all routers of a cluster should say the same"
        "starling, dynamo, round-robin, random, p2c, least-loaded, session, prefix-hash, or a table (a TOML file has [policy])"
    "session-header" "HEADER" up "x-session-id" join "x-session-id"
        "Request header whose value keeps requests on one worker under a policy with the scorer session"
        "the name of an HTTP header, 1 to 64 of a-z 0-9 - _"
    "queue-max" "N" up "1024" join "1024"
        "Requests of one model that may wait at the router while every worker is taken; 0 refuses them at once"
        "a whole number from 0 to 1048576"
    "queue-secs" "SECS" up "60" join "60"
        "Seconds that a request waits there at most; one that would wait longer at the present pace is refused at once"
        "a whole number from 1 to 86400"
    "queue-order" "ORDER" up "cached" join "cached"
        "Whom the queue serves first of one tenant and priority: deadline the earliest; cached likewise, but whose prompt needs less computing now goes up to queue-ahead-secs ahead; shortest-miss the fewest prompt tokens to compute"
        "cached, deadline or shortest-miss"
    "queue-prefill-steps" "N" up "3" join "3"
        "Prompts given to a worker ahead, in steps of its engine; what is more waits at the router and is bound to no worker; 0 for any number"
        "a whole number from 0 to 1024"
    "queue-ahead-secs" "SECS" up "10" join "10"
        "With queue-order cached: seconds by which a deadline may be earlier and its request still be passed by one whose prompt needs less computing now; 0 is the order deadline"
        "a whole number from 0 to 3600"
    "queue-kv-percent" "PERCENT" up "110" join "110"
        "KV blocks promised to requests on a worker, in percent of its pool; what is more waits at the router; above 100 some wait at the worker, which keeps its pool full; 0 for any number"
        "a whole number from 0 to 1000"
    "shard-decisions" "N" up "4000" join "4000"
        "Decisions a second that one router makes for a model; with more, the model's prompts are spread over twice as many routers"
        "a whole number from 1 to 1000000"
    "planner" "MODE" up "advise" join "advise"
        "What the planner of this router does about roles and numbers of workers: advise shows what it would do (`starling plan`), act does it; all routers of a cluster should say the same"
        "off, advise or act"
    "planner-ttft-ms" "MS" up "500" join "500"
        "Milliseconds to the first token that the planner plans for"
        "a whole number from 1 to 3600000"
    "planner-itl-ms" "MS" up "50" join "50"
        "Milliseconds between two tokens of an answer that the planner plans for"
        "a whole number from 1 to 60000"
    "planner-min" "N" up "1" join "1"
        "Workers of a model that the planner leaves able to answer, and able to compute prompts"
        "a whole number from 1 to 1024"
    "planner-max" "N" up "8" join "8"
        "Workers of a model that the planner wants at most, all roles together"
        "a whole number from 1 to 65536"
    "planner-interval" "SECS" up "10" join "10"
        "Seconds between two looks of the planner; it changes nothing more for three of them after a change"
        "a whole number from 1 to 3600"
    "planner-predictor" "KIND" up "constant" join "constant"
        "How the planner guesses the next interval's requests: constant as the last one, trend by a smoothed level and trend"
        "constant or trend"
    "planner-hook" "FILE" up "<none: the number of workers stays as it is>" join "<none: the number of workers stays as it is>"
        "Program that starts and stops workers when the planner acts; it gets what is wanted as JSON on its standard input"
        "a path to an executable file"
    "planner-hook-secs" "SECS" up "60" join "60"
        "Seconds that the planner's hook may run before it is killed and tried again later"
        "a whole number from 1 to 3600"
    "api-keys-file" "FILE" up "<none: the API is open>" join "<none: the API is open>"
        "File with the keys that API clients must send as `Authorization: Bearer KEY`, one a line, each with its tenant and rights; # begins a comment"
        "a path to a file with at least one key of 8 to 512 visible ASCII characters"
    "seeds" "SEED,..." up "<none>" join "<the arguments of `starling join`>"
        "Members to join by, joined by commas; of a DNS name all addresses are used; names are looked up and files read again at every try"
        "HOST:PORT, [IPV6]:PORT or file:PATH (one a line, # begins a comment), several joined by commas"
    "label" "KEY=VALUE" up "<none>" join "<none>"
        "Labels of this node that tables and pickers see; several joined by commas or by repeating the flag"
        "KEY=VALUE with a key and no comma, several joined by commas; at most 64, each side at most 1024 bytes"
    "log" "FORMAT" up "human" join "human"
        "Form of the log on standard error"
        "human or json"
    "log-level" "LEVEL" up "info" join "info"
        "How much is logged: error, warn, info, debug or trace, or a filter such as info,starling_cluster=debug"
        "a level or a comma-separated filter"
}

/// The setting of a name.
#[must_use]
pub fn setting(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// The setting whose name looks most like `text`, when one is close enough to be meant.
#[must_use]
pub fn suggest(text: &str) -> Option<&'static str> {
    let plain = text.to_lowercase().replace('_', "-");
    let near = SETTINGS.iter().map(|setting| (edit_distance(&plain, setting.name), setting.name)).min()?;
    (near.0 <= 1 + plain.len() / 4).then_some(near.1)
}

/// Insertions, deletions and substitutions between two words.
fn edit_distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let substituted = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_a_name_a_rule_and_its_own_row() {
        let mut names: Vec<_> = SETTINGS.iter().map(|s| s.name).collect();
        assert!(SETTINGS.iter().all(|s| !s.help.is_empty() && !s.rule.is_empty()));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), SETTINGS.len());
    }

    #[test]
    fn a_typing_slip_is_recognised_and_nonsense_is_not() {
        assert_eq!(suggest("worker"), Some("workers"));
        assert_eq!(suggest("kv_mib"), Some("kv-mib"));
        assert_eq!(suggest("sevred-name"), Some("served-name"));
        assert_eq!(suggest("temperature"), None);
    }

    #[test]
    fn variables_follow_the_name() {
        assert_eq!(setting("key-file").map(Setting::variable), Some("STARLING_KEY_FILE".to_owned()));
    }
}
