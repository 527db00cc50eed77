//! Says in its log what an image must not repeat: random names, the clock, the configuration as it is now.

use std::collections::HashMap;
use std::error::Error;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::time::Instant;
use torpor::{log, Level, Outcome, Request};

torpor::operator!(manifest(), reconcile);

/// The clock as it was before the image was taken: what has passed since is never less than nothing.
static STARTED: OnceLock<Instant> = OnceLock::new();

fn manifest() -> &'static str {
    STARTED.get_or_init(Instant::now);
    r#"{"for": {"resource": "example.com/v1/widgets"}, "sdk": "rust/0.1.0"}"#
}

fn reconcile(_: &Request) -> Result<Outcome, Box<dyn Error>> {
    let hash = RandomState::new().hash_one("name");
    // What the order of a map's keys says of its seed, as far as 12 keys can.
    let keys: HashMap<u8, ()> = (b'a'..b'm').map(|key| (key, ())).collect();
    let order: String = keys.keys().map(|&key| char::from(key)).collect();
    let since = STARTED.get().ok_or("describe was not called before the image")?.elapsed().as_nanos();
    let settings = String::from_utf8(torpor::config()?)?;
    log(
        Level::Info,
        &format!(r#"{{"names":{{"RandomState":"{hash:x}","HashMap order":"{order}"}},"monotonic_ns":{since},"settings":{settings}}}"#),
    );
    Ok(Outcome::Done)
}
