//! Reading and writing `plan.json`; plans of other versions and modified plans are rejected.
//!
//! The first key of the file is its seal, the SHA-256 of the text without that line. It shows that the plan was
//! not modified after compilation, including first values and hyper-parameters. It does not show who compiled it.

use super::{CheckError, Plan, check};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;
use std::io;

/// Version of the format of `plan.json`. Plans of other versions are refused.
pub const FORMAT_VERSION: u32 = 8;

/// Why a text is not a plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Not JSON, or not of this shape.
    #[error("not a plan: {0}")]
    Syntax(#[from] serde_json::Error),
    /// A plan of another version.
    #[error(
        "the plan has format version {found}, this program reads version {FORMAT_VERSION}; \
         compile the model again"
    )]
    Version {
        /// Its version.
        found: u64,
    },
    /// A plan that is not as it was written.
    #[error("the plan was changed after it was compiled; compile the model again")]
    Changed,
    /// A plan that no compiler writes.
    #[error(transparent)]
    Malformed(#[from] CheckError),
}

/// The beginning of the text of a plan, up to the digest.
const SEAL: &str = "{\n  \"sha256\": \"";
const SEAL_END: &str = "\",\n";

impl Plan {
    /// The text of `plan.json`: equal plans give equal bytes.
    pub fn to_json(&self) -> String {
        let mut text = Vec::new();
        let mut serializer = Serializer::with_formatter(&mut text, Outline::default());
        self.serialize(&mut serializer).expect("invariant: a plan serializes to JSON");
        seal(&String::from_utf8(text).expect("invariant: JSON is UTF-8"))
    }

    /// Reads the text of `plan.json` and checks the plan; every reader of plans goes through here.
    ///
    /// # Errors
    /// If it is not a plan, one of another format version, one that was changed after it was written, or one
    /// that is not well-formed.
    pub fn from_json(text: &str) -> Result<Plan, PlanError> {
        #[derive(serde::Deserialize)]
        struct Version {
            format_version: u64,
        }
        let Version { format_version: found } = serde_json::from_str(text)?;
        if found != u64::from(FORMAT_VERSION) {
            return Err(PlanError::Version { found });
        }
        let plan: Plan = serde_json::from_str(text)?;
        if !is_sealed(text) {
            return Err(PlanError::Changed);
        }
        check(&plan)?;
        Ok(plan)
    }
}

/// The text of `plan.json` for the JSON of a plan.
pub fn seal(json: &str) -> String {
    let fields = json.strip_prefix('{').unwrap_or(json).trim_matches('\n');
    let digest = sha256_hex(fields.as_bytes());
    format!("{SEAL}{digest}{SEAL_END}{fields}\n")
}

fn is_sealed(text: &str) -> bool {
    let parts = text.strip_prefix(SEAL).and_then(|rest| rest.split_once(SEAL_END));
    let digest = |fields: &str| sha256_hex(fields.trim_end_matches('\n').as_bytes());
    parts.is_some_and(|(seal, fields)| seal == digest(fields))
}

/// SHA-256 in hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Levels of a plan that have a line for each of their values: the plan, its tables, their rows. What is in a row's value
/// is on its line.
const LEVELS: usize = 3;

/// Writes JSON so.
#[derive(Default)]
struct Outline {
    level: usize,
    has_values: bool,
}

impl Outline {
    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.has_values = false;
        writer.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.has_values && self.level < LEVELS {
            self.line(writer)?;
        }
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        let lines = self.level <= LEVELS;
        match (lines, first) {
            (false, true) => Ok(()),
            (false, false) => writer.write_all(b", "),
            (true, true) => self.line(writer),
            (true, false) => {
                writer.write_all(b",")?;
                self.line(writer)
            }
        }
    }

    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b"\n")?;
        (0..self.level).try_for_each(|_| writer.write_all(b"  "))
    }
}

impl Formatter for Outline {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_values = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_values = true;
        Ok(())
    }
}
