//! The pass trace: the graph after every pass of a compilation, which `frit compile` writes beside the plan and `frit verify` checks.
//!
//! It is JSON, compressed by gzip. The graph that the passes begin on is not in it: whoever reads a trace has imported the model and
//! begins there too. From graph to graph it has the nodes that are new or changed ([`form`]), so a pass that changes
//! nothing takes a few bytes. Operations, origins and names are in tables that begin with those of the imported graph: large
//! constants of the model are not in the trace, and what a pass makes of them is there once.
//!
//! Nothing that is proved relies on what a trace says: a graph from it is held against the one before, the first against
//! the imported model and the last against the plan.

mod form;
mod read;
mod record;
mod tables;

pub use read::{Stage, read};
pub use record::Recorder;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use form::Trace;
use std::io::{Read, Write};

/// Most bytes of a trace when it is not compressed.
const LARGEST: u64 = 1 << 30;

/// The file of a trace; the same for equal traces.
fn packed(trace: &Trace) -> Vec<u8> {
    let written = |trace: &Trace| {
        let mut file = GzEncoder::new(Vec::new(), Compression::default());
        file.write_all(&serde_json::to_vec(trace)?)?;
        file.finish()
    };
    written(trace).expect("invariant: memory takes all that is written")
}

/// What a file says; an error in words.
fn unpacked(file: &[u8]) -> Result<Trace, String> {
    let mut json = Vec::new();
    let read = GzDecoder::new(file).take(LARGEST).read_to_end(&mut json);
    read.map_err(|e| e.to_string())?;
    serde_json::from_slice(&json).map_err(|e| e.to_string())
}
