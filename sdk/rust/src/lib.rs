//! The Torpor operator ABI (`proto/wit/abi.md`) for Rust.
//!
//! ```ignore
//! torpor::operator!(r#"{"for": {"resource": "example.com/v1/widgets"}}"#, reconcile);
//!
//! fn reconcile(request: &torpor::Request) -> Result<torpor::Outcome, Box<dyn std::error::Error>> {
//!     let answer = torpor::kube(&torpor::KubeRequest::get("/api/v1/namespaces"))?;
//!     Ok(torpor::Outcome::Done)
//! }
//! ```
//!
//! `kube-core` and `k8s-openapi` build for `wasm32-wasip1`: turn an `http::Request` of theirs into a [`KubeRequest`].

use std::fmt;
use std::time::Duration;

mod message;
use message::{encode, Fields};

/// The key to reconcile and why. Level-triggered: do not depend on the cause.
#[derive(Debug, Clone)]
pub struct Request {
    /// Empty for a cluster-scoped primary.
    pub namespace: String,
    /// The primary's name.
    pub name: String,
    /// `start`, `watch`, `timer`, `resync`, `retry` or `wake`.
    pub cause: String,
    /// 0 at first, counted up by retries of the same key.
    pub attempt: u32,
    /// W3C trace context of the change, or empty.
    pub traceparent: String,
}

/// How a reconcile ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing to do until the next event.
    Done,
    /// Again after this time, whatever happens.
    RequeueAfter(Duration),
}

/// A request to the Kubernetes API, as the operator.
#[derive(Debug, Clone)]
pub struct KubeRequest<'a> {
    /// `GET`, `POST`, `PUT`, `PATCH` or `DELETE`.
    pub method: &'a str,
    /// Path and query, from `/api` or `/apis`.
    pub path: &'a str,
    /// The media types that are understood.
    pub accept: &'a str,
    /// Of `body`.
    pub content_type: &'a str,
    /// Empty for none.
    pub body: &'a [u8],
    /// `None`: as long as the reconcile has.
    pub timeout: Option<Duration>,
}

impl<'a> KubeRequest<'a> {
    /// A request with a JSON body; an empty one for none.
    pub fn new(method: &'a str, path: &'a str, body: &'a [u8]) -> Self {
        let json = "application/json";
        Self { method, path, accept: json, content_type: json, body, timeout: None }
    }

    /// Reads one object or a list.
    pub fn get(path: &'a str) -> Self {
        Self::new("GET", path, b"")
    }

    /// Server-side apply; the path needs `?fieldManager=`.
    pub fn apply(path: &'a str, body: &'a [u8]) -> Self {
        Self { content_type: "application/apply-patch+yaml", ..Self::new("PATCH", path, body) }
    }
}

/// What the API server answered, whatever the status.
#[derive(Debug, Clone)]
pub struct Response {
    /// The HTTP status.
    pub status: u16,
    /// The true type of `body`.
    pub content_type: String,
    /// The whole body.
    pub body: Vec<u8>,
}

/// Why a call got no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    /// `deadline`, `unavailable`, `fenced`, `denied`, `too-large`, `unimplemented` or `invalid`.
    pub code: String,
    /// For a person.
    pub message: String,
}

impl CallError {
    fn invalid(message: &str) -> Self {
        Self { code: "invalid".into(), message: message.into() }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for CallError {}

/// Sends a request to the Kubernetes API and waits for the answer.
pub fn kube(request: &KubeRequest<'_>) -> Result<Response, CallError> {
    let timeout = request.timeout.map(|t| t.as_millis().to_string()).unwrap_or_default();
    let message = encode(&[
        request.method.as_bytes(),
        request.path.as_bytes(),
        request.accept.as_bytes(),
        request.content_type.as_bytes(),
        request.body,
        timeout.as_bytes(),
    ]);
    let bytes = host::result(unsafe { host::kube_request(message.as_ptr(), message.len()) })?;
    let mut fields = Fields::new(&bytes);
    let (status, content_type, body) = (fields.text(), fields.text(), fields.next().to_vec());
    let (code, message) = (fields.text(), fields.text());
    if !code.is_empty() {
        return Err(CallError { code, message });
    }
    let status = status.parse().map_err(|_| CallError::invalid("the host sent no status"))?;
    Ok(Response { status, content_type, body })
}

/// `{"config": {…}, "env": {…}}` as JSON, as they are now.
pub fn config() -> Result<Vec<u8>, CallError> {
    host::result(unsafe { host::config() })
}

/// How much a line of log matters.
#[derive(Debug, Clone, Copy)]
pub enum Level {
    /// For the operator's author.
    Debug = 0,
    /// What happened.
    Info = 1,
    /// What may need a look.
    Warning = 2,
    /// What needs one.
    Error = 3,
}

/// Writes a line to the operator's log.
pub fn log(level: Level, line: &str) {
    unsafe { host::log(level as i32, line.as_ptr(), line.len()) }
}

mod host {
    use super::CallError;

    #[link(wasm_import_module = "torpor")]
    extern "C" {
        pub fn kube_request(ptr: *const u8, len: usize) -> i32;
        pub fn config() -> i32;
        pub fn log(level: i32, ptr: *const u8, len: usize);
        fn take(ptr: *mut u8, len: usize) -> i32;
    }

    /// Takes the pending result whose length a call returned.
    pub fn result(length: i32) -> Result<Vec<u8>, CallError> {
        let size = usize::try_from(length).map_err(|_| CallError::invalid("the host refused the call"))?;
        let mut buffer = vec![0; size];
        if unsafe { take(buffer.as_mut_ptr(), size) } != length {
            return Err(CallError::invalid("the host held no result"));
        }
        Ok(buffer)
    }
}

/// What [`operator!`] expands to; not for direct use.
#[doc(hidden)]
pub mod exports {
    use super::{encode, Fields, Outcome, Request};
    use std::cell::RefCell;
    use std::error::Error;

    thread_local! {
        /// The input that the host fills, then the reply that it copies: one of each is alive at a time.
        static INPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        static REPLY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }

    pub fn alloc(len: usize) -> *mut u8 {
        INPUT.with_borrow_mut(|input| {
            input.clear();
            if input.try_reserve_exact(len.max(1)).is_err() {
                return std::ptr::null_mut();
            }
            input.resize(len, 0);
            input.as_mut_ptr()
        })
    }

    pub fn describe(manifest: &str) -> i64 {
        reply(&[b"", manifest.as_bytes()])
    }

    pub fn reconcile(len: usize, call: impl FnOnce(&Request) -> Result<Outcome, Box<dyn Error>>) -> i64 {
        let request = INPUT.with_borrow(|input| {
            let mut fields = Fields::new(&input[..len.min(input.len())]);
            Request {
                namespace: fields.text(),
                name: fields.text(),
                cause: fields.text(),
                attempt: fields.text().parse().unwrap_or(0),
                traceparent: fields.text(),
            }
        });
        match call(&request) {
            Ok(Outcome::Done) => reply(&[b"done"]),
            Ok(Outcome::RequeueAfter(after)) => reply(&[b"requeue", after.as_millis().to_string().as_bytes()]),
            Err(error) => reply(&[b"error", b"", error.to_string().as_bytes()]),
        }
    }

    fn reply(fields: &[&[u8]]) -> i64 {
        REPLY.with_borrow_mut(|kept| {
            *kept = encode(fields);
            (kept.as_ptr() as i64) << 32 | kept.len() as i64
        })
    }
}

/// Exports an operator: its manifest (JSON) and its reconcile function.
#[macro_export]
macro_rules! operator {
    ($manifest:expr, $reconcile:path) => {
        #[no_mangle]
        extern "C" fn torpor_abi_version() -> i32 {
            1
        }
        #[no_mangle]
        extern "C" fn torpor_alloc(len: usize) -> *mut u8 {
            $crate::exports::alloc(len)
        }
        #[no_mangle]
        extern "C" fn torpor_describe() -> i64 {
            $crate::exports::describe($manifest)
        }
        #[no_mangle]
        extern "C" fn torpor_reconcile(_ptr: *const u8, len: usize) -> i64 {
            $crate::exports::reconcile(len, |request| $reconcile(request).map_err(Into::into))
        }
    };
}
