//! Routines: how a CPU computes a kernel that is not generated, by a function of the kernel library.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A routine, its parameters, and where its operands come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Routine {
    /// The function.
    #[serde(flatten)]
    pub call: RoutineCall,
    /// Where its operands are; absent if they are the task's, in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<Vec<Source>>,
    /// Which of the task's results its own are, and the first byte within; absent if they are the same, in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writes: Option<Vec<(usize, usize)>>,
}

/// A routine by name, with its parameters as the kernel library defines them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutineCall {
    /// Its name.
    pub name: String,
    /// Its parameters.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub parameters: serde_json::Value,
}

/// The source of an operand of a routine: `read 0 + 64` or `constant 1` in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Source {
    /// The task's `i`-th operand, from this byte on.
    Operand(usize, usize),
    /// The body's `i`-th constant, from this byte on.
    Constant(usize, usize),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, i, at) = match self {
            Source::Operand(i, at) => ("read", i, at),
            Source::Constant(i, at) => ("constant", i, at),
        };
        match at {
            0 => write!(f, "{word} {i}"),
            at => write!(f, "{word} {i} + {at}"),
        }
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Source, String> {
        let refuse = || format!("`{text}` is no operand");
        let number = |text: &str| text.parse::<usize>().map_err(|_| refuse());
        let (base, at) = match text.split_once(" + ") {
            Some((base, at)) => (base, number(at)?),
            None => (text, 0),
        };
        match base.split_once(' ') {
            Some(("read", i)) => Ok(Source::Operand(number(i)?, at)),
            Some(("constant", i)) => Ok(Source::Constant(number(i)?, at)),
            _ => Err(refuse()),
        }
    }
}

impl From<Source> for String {
    fn from(source: Source) -> String {
        source.to_string()
    }
}

impl TryFrom<String> for Source {
    type Error = String;

    fn try_from(text: String) -> Result<Source, String> {
        text.parse()
    }
}
