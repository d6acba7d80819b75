//! Parsing of the text form.

use crate::ops::{Fusion, FusionKind};
use crate::{DType, Graph, Op, Origin, OutputKind, Region, Shape, TensorType, ValueId};
use std::collections::HashMap;

/// A text that is not a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// The error.
    pub message: String,
}

/// Reads one graph. Text from `;` to the end of a line is a comment.
///
/// # Errors
/// The first line that is not understood, or whose types are not those that its operation infers.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    let mut parser = Parser { text, at: 0, depth: 0 };
    let graph = parser.graph()?;
    parser.skip();
    if parser.at < text.len() {
        return Err(parser.error("text after the graph"));
    }
    Ok(graph)
}

/// Maximum nesting: a program contains fusions, whose bodies contain none.
const MAX_DEPTH: usize = 4;

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// Graphs around the current position.
    depth: usize,
}

type Result<T, E = ParseError> = std::result::Result<T, E>;

impl<'a> Parser<'a> {
    fn error(&self, message: impl Into<String>) -> ParseError {
        self.error_at(self.at, message)
    }

    fn error_at(&self, at: usize, message: impl Into<String>) -> ParseError {
        let line = 1 + self.text[..at].matches('\n').count();
        ParseError { line, message: message.into() }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start();
            self.at += rest.len() - trimmed.len();
            if !trimmed.starts_with(';') {
                return;
            }
            self.at += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    fn eat(&mut self, token: &str) -> bool {
        self.skip();
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        if self.eat(token) { Ok(()) } else { Err(self.error(format!("expected `{token}`"))) }
    }

    fn word(&mut self) -> Result<&'a str> {
        self.skip();
        let rest = self.rest();
        let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$' | '-');
        let len = rest.find(|c| !ok(c)).unwrap_or(rest.len());
        if len == 0 {
            return Err(self.error("expected a name"));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    /// One JSON value, by serde_json's own reader.
    fn json(&mut self) -> Result<serde_json::Value> {
        self.skip();
        let mut stream = serde_json::Deserializer::from_str(self.rest()).into_iter();
        match stream.next() {
            Some(Ok(value)) => {
                self.at += stream.byte_offset();
                Ok(value)
            }
            Some(Err(e)) => Err(self.error(format!("bad attribute value: {e}"))),
            None => Err(self.error("expected a value")),
        }
    }

    fn string(&mut self) -> Result<String> {
        match self.json()? {
            serde_json::Value::String(s) => Ok(s),
            other => Err(self.error(format!("expected a string, found {other}"))),
        }
    }

    fn ty(&mut self) -> Result<TensorType> {
        let name = self.word()?;
        let dtype: DType = name.parse().map_err(|e: String| self.error(e))?;
        let dims: Vec<usize> = serde_json::from_value(self.json()?)
            .map_err(|e| self.error(format!("bad shape: {e}")))?;
        Ok(TensorType { dtype, shape: Shape(dims) })
    }

    fn graph(&mut self) -> Result<Graph> {
        if self.depth == MAX_DEPTH {
            return Err(self.error("graphs are nested too deeply"));
        }
        self.depth += 1;
        let graph = self.one_graph();
        self.depth -= 1;
        graph
    }

    fn one_graph(&mut self) -> Result<Graph> {
        self.expect("graph")?;
        self.expect("@")?;
        let mut graph = Graph::new(self.word()?);
        self.expect("world=")?;
        graph.world_size = self.word()?.parse().map_err(|_| self.error("bad world size"))?;
        self.expect("{")?;
        let mut names = HashMap::new();
        loop {
            if self.eat("}") {
                return Ok(graph);
            }
            if self.eat("return") {
                self.output(&mut graph, &names)?;
            } else {
                self.node(&mut graph, &mut names)?;
            }
        }
    }

    fn value(&mut self, names: &HashMap<&'a str, ValueId>) -> Result<ValueId> {
        self.expect("%")?;
        let name = self.word()?;
        names.get(name).copied().ok_or_else(|| self.error(format!("%{name} is not defined")))
    }

    fn output(&mut self, graph: &mut Graph, names: &HashMap<&'a str, ValueId>) -> Result<()> {
        let value = self.value(names)?;
        self.expect("as")?;
        let name = self.string()?;
        let kind = if self.eat("loss_sum") {
            OutputKind::LossSum
        } else if self.eat("loss_count") {
            OutputKind::LossCount
        } else if self.eat("gradient") {
            OutputKind::Gradient
        } else if self.eat("metric") {
            OutputKind::Metric
        } else if self.eat("carry") {
            OutputKind::Carry(self.value(names)?)
        } else {
            OutputKind::Result
        };
        graph.add_output(&name, value, kind);
        Ok(())
    }

    fn node(&mut self, graph: &mut Graph, names: &mut HashMap<&'a str, ValueId>) -> Result<()> {
        self.skip();
        let start = self.at;
        let mut results = Vec::new();
        loop {
            self.expect("%")?;
            let name = self.word()?;
            self.expect(":")?;
            results.push((name, self.ty()?));
            if !self.eat(",") {
                break;
            }
        }
        self.expect("=")?;
        let op_name = self.word()?;
        let mut inputs = Vec::new();
        self.skip();
        if self.rest().starts_with('%') {
            loop {
                inputs.push(self.value(names)?);
                if !self.eat(",") {
                    break;
                }
            }
        }
        let mut attributes = serde_json::Map::new();
        if self.eat("{") {
            while !self.eat("}") {
                let key = self.word()?.to_string();
                self.expect("=")?;
                let value = self.json()?;
                attributes.insert(key, value);
                self.eat(",");
            }
        }
        let op = if op_name == "fusion" {
            let kind = attributes.get("kind").cloned().unwrap_or_default();
            let kind: FusionKind = serde_json::from_value(kind)
                .map_err(|e| self.error(format!("fusion kind: {e}")))?;
            self.expect("body")?;
            Op::Fusion(Box::new(Fusion { kind, body: self.graph()? }))
        } else {
            Op::from_parts(op_name, attributes).map_err(|e| self.error_at(start, e.to_string()))?
        };
        let region = if self.eat("@") { self.region()? } else { Region::Forward };
        let origin = if self.eat("loc(") {
            let source = self.string()?;
            self.expect(",")?;
            let scope = self.string()?;
            self.expect(",")?;
            let pass = self.string()?;
            self.expect(")")?;
            Origin::new(&source, &scope).by(&pass)
        } else {
            Origin::none()
        };
        let outputs = graph
            .add(op, &inputs, origin, region)
            .map_err(|e| self.error_at(start, e.to_string()))?;
        if outputs.len() != results.len() {
            return Err(self.error_at(start, format!("`{op_name}` has {} results", outputs.len())));
        }
        for ((name, ty), output) in results.into_iter().zip(outputs) {
            if *graph.ty(output) != ty {
                return Err(
                    self.error_at(start, format!("%{name} is {}, not {ty}", graph.ty(output)))
                );
            }
            if names.insert(name, output).is_some() {
                return Err(self.error_at(start, format!("%{name} is defined twice")));
            }
            if name.parse::<u64>().is_err() {
                graph.set_name(output, name);
            }
        }
        Ok(())
    }

    fn region(&mut self) -> Result<Region> {
        let word = self.word()?;
        match word {
            "forward" => Ok(Region::Forward),
            "backward" => Ok(Region::Backward),
            "update" => Ok(Region::Update),
            _ => word
                .strip_prefix("recompute")
                .and_then(|k| k.parse().ok())
                .map(Region::Recompute)
                .ok_or_else(|| self.error(format!("unknown region `{word}`"))),
        }
    }
}
