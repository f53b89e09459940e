//! Streaming both ways between two processes: lines go out, the count of each line's words comes back at once, and the
//! totals follow when the text has ended.
//!
//! ```console
//! $ cargo run --example word_count -- serve
//! ready 127.0.0.1:41234
//! $ cargo run --example word_count -- feed 127.0.0.1:41234 < README.md
//! ```
#![allow(clippy::print_stdout)] // an example talks to a person

use std::{collections::BTreeMap, error::Error, time::Duration};

use serde::{Deserialize, Serialize};
use starling::{Endpoint, Fault, JoinConfig, Mesh, Receiver, Sender};

/// What comes back.
#[derive(Debug, Serialize, Deserialize)]
enum Counted {
    /// Words of one line, in the order of the lines.
    Line(usize),
    /// A word and how often it came, most frequent first; after the last line.
    Total(String, usize),
}

fn words(mesh: &Mesh) -> Result<Endpoint<String, Counted>, Box<dyn Error>> {
    Ok(mesh.namespace("examples")?.component("words")?.endpoint("count")?)
}

/// Lives as long as one caller's stream. A caller that reads slowly slows its own count and nobody else's.
async fn count(mut lines: Receiver<String>, counted: Sender<Counted>) -> Result<(), Fault> {
    let mut totals: BTreeMap<String, usize> = BTreeMap::new();
    while let Some(line) = lines.next().await {
        let line = line?.to_lowercase();
        let words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
        words.iter().for_each(|word| *totals.entry((*word).to_owned()).or_default() += 1);
        counted.send(&Counted::Line(words.len())).await?;
    }
    let mut totals: Vec<_> = totals.into_iter().collect();
    totals.sort_by_key(|(_, times)| std::cmp::Reverse(*times));
    for (word, times) in totals {
        counted.send(&Counted::Total(word, times)).await?;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // One key file for all: whoever starts first makes it.
    let config = |name: &str| JoinConfig::new(name).key_file_or_new("cluster.key");
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => {
            let mesh = Mesh::join(config("words").bind("127.0.0.1:0".parse()?)).await?;
            let _served = words(&mesh)?.serve_duplex(count)?;
            println!("ready {}", mesh.address());
            println!("ended: {}", mesh.failed().await);
        }
        ["feed", seed] => {
            let mesh = Mesh::join(config("feeder").seed(seed)).await?;
            let client = words(&mesh)?.client();
            if !client.wait_for(1, Duration::from_secs(10)).await {
                return Err("no word count in this cluster".into());
            }
            let (lines, mut counted) = client.duplex().await?.split();
            let text = std::io::read_to_string(std::io::stdin())?;
            let feed = async {
                for line in text.lines() {
                    lines.send(&line.to_owned()).await?;
                }
                lines.end();
                Ok::<_, Box<dyn Error>>(())
            };
            let print = async {
                while let Some(counted) = counted.next().await {
                    match counted? {
                        Counted::Line(words) => println!("line of {words}"),
                        Counted::Total(word, times) => println!("{times} {word}"),
                    }
                }
                Ok(())
            };
            tokio::try_join!(feed, print)?;
            mesh.leave().await;
        }
        _ => return Err("usage: word_count serve | word_count feed HOST:PORT < TEXT".into()),
    }
    Ok(())
}
