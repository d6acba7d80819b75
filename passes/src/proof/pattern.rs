//! Left sides of rules as graphs: expansion of alternatives, and the expressions (see `rule.rs`).

use frit_ir::ops::{Constant, Init, Input, Param, ParamKind};
use frit_ir::{DType, Graph, Op, Origin, OutputKind, Region, Shape, Tensor, TensorType, ValueId};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The names of sizes.
pub(super) const LETTERS: [char; 8] = ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'];

/// What the letters stand for.
pub(super) type Sizes = [usize; 8];

/// The value of a constant that stands for any; no rule looks for it.
pub(super) const ANY: f64 = 7.0;

/// Axes of the shapes that `[*]` stands for.
const MAX_RANK: usize = 4;

/// All instances of a left side: one choice for each alternative.
pub(super) fn instances(pattern: &str) -> Vec<String> {
    if !pattern.contains("[*]") {
        return choices(pattern);
    }
    let of_rank = |rank: usize| {
        let dims: Vec<String> = LETTERS[..rank].iter().map(char::to_string).collect();
        let axes: Vec<String> = (0..rank).map(|i| i.to_string()).collect();
        let perms: Vec<String> = permutations(rank).iter().map(|p| format!("{p:?}")).collect();
        let named = [("perm", perms.join("|")), ("axis", axes.join("|"))];
        let mut text = pattern
            .replace("[*]", &format!("[{}]", dims.join(",")))
            .replace("<dims>", &dims.join(","))
            .replace("<identity>", &format!("[{}]", axes.join(",")));
        for (name, all) in named {
            if all.is_empty() && text.contains(&format!("<{name}>")) {
                return Vec::new();
            }
            text = text.replace(&format!("<{name}>"), &format!("<{all}>"));
            text = text.replace(&format!("={name}>"), &format!("={all}>"));
        }
        choices(&text)
    };
    (0..=MAX_RANK).flat_map(of_rank).collect()
}

fn choices(text: &str) -> Vec<String> {
    let Some(open) = text.find('<') else { return vec![text.replace(' ', "")] };
    let close = open + text[open..].find('>').expect("`>` after `<`");
    let body = &text[open + 1..close];
    let is_named = body.as_bytes().get(1) == Some(&b'=');
    let all = if is_named { &body[2..] } else { body };
    let chosen = |choice: &str| {
        let rest = match is_named {
            true => text[close + 1..].replace(&format!("<{}>", &body[..1]), choice),
            false => text[close + 1..].to_string(),
        };
        choices(&format!("{}{choice}{rest}", &text[..open]))
    };
    all.split('|').flat_map(chosen).collect()
}

/// All orders of so many axes.
pub(super) fn permutations(n: usize) -> Vec<Vec<usize>> {
    let Some(last) = n.checked_sub(1) else { return vec![vec![]] };
    let insert = |shorter: Vec<usize>| {
        (0..n).map(move |at| [&shorter[..at], &[last], &shorter[at..]].concat())
    };
    let mut all: Vec<Vec<usize>> = permutations(last).into_iter().flat_map(insert).collect();
    all.sort();
    all
}

/// The graph of an instance, whose only output is the value of the last statement; an error if an operation does not fit
/// operands of these sizes.
pub(super) fn graph(instance: &str, sizes: Sizes) -> Result<Graph, String> {
    let graph = Graph::new("rule");
    let mut parser =
        Parser { rest: instance, sizes, graph, names: HashMap::new(), made: HashMap::new() };
    let mut last = None;
    for statement in instance.split(';') {
        let (name, expression) = match statement.split_once('=') {
            Some((name, rest)) if name.chars().all(char::is_alphanumeric) => (Some(name), rest),
            _ => (None, statement),
        };
        parser.rest = expression;
        let value = parser.expression()?;
        if !parser.rest.is_empty() {
            return Err(format!("`{}` is left of `{statement}`", parser.rest));
        }
        parser.names.extend(name.map(|name| (name.to_string(), value)));
        last = Some(value);
    }
    let root = last.ok_or("no statement")?;
    parser.graph.add_output("y", root, OutputKind::Result);
    Ok(parser.graph)
}

struct Parser<'a> {
    rest: &'a str,
    sizes: Sizes,
    graph: Graph,
    names: HashMap<String, ValueId>,
    /// Equal nodes are one.
    made: HashMap<(Op, Vec<ValueId>), ValueId>,
}

impl<'a> Parser<'a> {
    fn eat(&mut self, token: char) -> bool {
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn word(&mut self) -> &'a str {
        let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    /// What is before the next of these characters outside of brackets.
    fn until(&mut self, ends: [char; 2]) -> &'a str {
        let mut depth = 0;
        let end = self.rest.find(|c: char| {
            let found = depth == 0 && ends.contains(&c);
            depth += i32::from(matches!(c, '[' | '(')) - i32::from(matches!(c, ']' | ')'));
            found
        });
        let (text, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        text
    }

    fn expression(&mut self) -> Result<ValueId, String> {
        let kind = self.rest.chars().next().filter(|c| "@$%".contains(*c));
        kind.map(|c| self.eat(c));
        let word = self.word();
        if self.eat(':') {
            return self.leaf(kind, word);
        }
        if !self.rest.starts_with(['{', '(']) {
            return self.names.get(word).copied().ok_or(format!("no value `{word}`"));
        }
        let mut attributes = Map::new();
        if self.eat('{') {
            while !self.eat('}') {
                let key = self.word();
                self.eat('=');
                let value = self.until([',', '}']);
                attributes.insert(key.into(), self.json(value)?);
                self.eat(',');
            }
        }
        self.eat('(');
        let mut operands = Vec::new();
        while !self.eat(')') {
            operands.push(self.expression()?);
            self.eat(',');
        }
        let op = Op::from_parts(word, attributes).map_err(|e| e.to_string())?;
        self.add(op, operands)
    }

    fn add(&mut self, op: Op, operands: Vec<ValueId>) -> Result<ValueId, String> {
        if let Some(value) = self.made.get(&(op.clone(), operands.clone())) {
            return Ok(*value);
        }
        let value = self.graph.add1(op.clone(), &operands, Origin::none(), Region::Forward);
        let value = value.map_err(|e| e.to_string())?;
        self.made.insert((op, operands), value);
        Ok(value)
    }

    fn leaf(&mut self, kind: Option<char>, word: &str) -> Result<ValueId, String> {
        let dtype = self.word();
        let dtype: DType = serde_json::from_value(dtype.into()).map_err(|e| e.to_string())?;
        self.eat('[');
        let dims = self.until([']', ']']);
        self.eat(']');
        let dims: Vec<usize> = self.list(dims)?.into_iter().map(|n| n as usize).collect();
        let ty = TensorType::new(dtype, Shape(dims));
        let name = word.to_string();
        let op = match (kind, word.parse::<f64>()) {
            (None, Ok(value)) => Op::Constant(Constant { value: Tensor::splat(ty, value) }),
            (Some('@'), _) => Op::Constant(Constant { value: Tensor::splat(ty, ANY) }),
            (None, _) => Op::Input(Input { name, ty }),
            (Some(kind), _) => Op::Param(Param {
                name,
                ty,
                kind: ParamKind::Trainable,
                reason: String::new(),
                init: Init::Constant(0.5),
                held: None,
                unit: None,
                sharded: kind == '$',
            }),
        };
        let value = self.add(op, Vec::new())?;
        self.names.insert(word.into(), value);
        Ok(value)
    }

    fn json(&self, text: &str) -> Result<Value, String> {
        if let Some(list) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            return self.list(list).map(Value::from);
        }
        serde_json::from_str(text).or_else(|_| self.number(text).map(Value::from))
    }

    fn list(&self, text: &str) -> Result<Vec<i64>, String> {
        text.split(',').filter(|item| !item.is_empty()).map(|item| self.number(item)).collect()
    }

    /// A number, or sums, differences and products of sizes.
    fn number(&self, text: &str) -> Result<i64, String> {
        if let Ok(number) = text.parse() {
            return Ok(number);
        }
        if let Some((left, right)) = text.split_once('+') {
            return Ok(self.number(left)? + self.number(right)?);
        }
        if let Some((left, right)) = text.split_once('*') {
            return Ok(self.number(left)? * self.number(right)?);
        }
        let letter = LETTERS.iter().position(|c| text == c.to_string());
        letter.map(|i| self.sizes[i] as i64).ok_or(format!("`{text}` is no number"))
    }
}
