//! Builds MLIR text, one operation at a time. Values carry their type, so none has to be inferred.

use std::collections::HashMap;
use std::fmt::{self, Write};

/// Element types of MLIR values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Elem {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    I1,
    Index,
}

impl Elem {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Elem::F64 => "f64",
            Elem::F32 => "f32",
            Elem::F16 => "f16",
            Elem::BF16 => "bf16",
            Elem::I64 => "i64",
            Elem::I32 => "i32",
            Elem::I16 => "i16",
            Elem::I8 => "i8",
            Elem::I1 => "i1",
            Elem::Index => "index",
        }
    }
}

/// A scalar (width 1) or vector type.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Type(pub(crate) Elem, pub(crate) usize);

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            1 => f.write_str(self.0.name()),
            n => write!(f, "vector<{n}x{}>", self.0.name()),
        }
    }
}

/// An SSA value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Val {
    id: u32,
    /// Index among the results of a loop.
    part: Option<u32>,
    pub(crate) elem: Elem,
    pub(crate) width: usize,
}

impl Val {
    pub(crate) fn ty(self) -> Type {
        Type(self.elem, self.width)
    }
}

impl fmt::Display for Val {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            None => write!(f, "%{}", self.id),
            Some(part) => write!(f, "%{}#{part}", self.id),
        }
    }
}

/// The text of one function. Constants are collected at its head, so that each is written once and
/// is visible everywhere.
#[derive(Default)]
pub(crate) struct Text {
    /// Whether 2ˣ is an instruction, `ex2` of PTX.
    pub(crate) has_exp2: bool,
    constants: String,
    body: String,
    known: HashMap<(Type, String), Val>,
    next: u32,
}

impl Text {
    /// An empty function of a target that may have an instruction for 2ˣ.
    pub(crate) fn new(has_exp2: bool) -> Text {
        Text { has_exp2, ..Text::default() }
    }

    /// Constants, then everything else.
    pub(crate) fn finish(self) -> String {
        self.constants + &self.body
    }

    /// A fresh name of this type.
    pub(crate) fn name(&mut self, ty: Type) -> Val {
        self.next += 1;
        Val { id: self.next, part: None, elem: ty.0, width: ty.1 }
    }

    /// Writes a line that defines nothing.
    pub(crate) fn line(&mut self, line: fmt::Arguments<'_>) {
        self.body.write_fmt(line).expect("invariant: a String takes all text");
        self.body.push('\n');
    }

    /// Writes an operation with one result.
    pub(crate) fn def(&mut self, ty: Type, op: fmt::Arguments<'_>) -> Val {
        let val = self.name(ty);
        self.line(format_args!("{val} = {op}"));
        val
    }

    fn constant(&mut self, ty: Type, literal: String) -> Val {
        if let Some(&val) = self.known.get(&(ty, literal.clone())) {
            return val;
        }
        let val = self.name(ty);
        let dense = if ty.1 == 1 { literal.clone() } else { format!("dense<{literal}>") };
        // `true` and `false` imply their type, and MLIR accepts no annotation.
        let of = if ty == Type(Elem::I1, 1) { String::new() } else { format!(" : {ty}") };
        writeln!(self.constants, "{val} = arith.constant {dense}{of}")
            .expect("invariant: a String takes all text");
        self.known.insert((ty, literal), val);
        val
    }

    /// An f32 constant, by its bits so that none is rounded.
    pub(crate) fn float(&mut self, x: f32, width: usize) -> Val {
        self.constant(Type(Elem::F32, width), format!("0x{:08X}", x.to_bits()))
    }

    /// An f64 constant.
    pub(crate) fn double(&mut self, x: f64, width: usize) -> Val {
        self.constant(Type(Elem::F64, width), format!("0x{:016X}", x.to_bits()))
    }

    /// An integer constant.
    pub(crate) fn int(&mut self, x: i64, elem: Elem, width: usize) -> Val {
        let literal = match elem {
            Elem::I1 => (x != 0).to_string(),
            _ => x.to_string(),
        };
        self.constant(Type(elem, width), literal)
    }

    /// An index constant.
    pub(crate) fn index(&mut self, x: usize) -> Val {
        self.int(x as i64, Elem::Index, 1)
    }

    /// The vector `[0, step, 2·step …]`.
    pub(crate) fn ramp(&mut self, step: i64, elem: Elem, width: usize) -> Val {
        let lanes: Vec<String> = (0..width as i64).map(|i| (i * step).to_string()).collect();
        self.constant_list(Type(elem, width), lanes)
    }

    /// The mask whose first `n` lanes are active.
    pub(crate) fn mask(&mut self, n: usize, width: usize) -> Val {
        let lanes = (0..width).map(|i| (i < n).to_string()).collect();
        self.constant_list(Type(Elem::I1, width), lanes)
    }

    fn constant_list(&mut self, ty: Type, lanes: Vec<String>) -> Val {
        let list = if ty.1 == 1 { lanes.concat() } else { format!("[{}]", lanes.join(", ")) };
        self.constant(ty, list)
    }

    /// An operation whose result has the type of its first operand: `add(a, b)`, `fma(a, b, c)` …
    pub(crate) fn same(&mut self, op: &str, operands: &[Val]) -> Val {
        let ty = operands[0].ty();
        let list: Vec<String> = operands.iter().map(Val::to_string).collect();
        self.def(ty, format_args!("{op} {} : {ty}", list.join(", ")))
    }

    /// An operation `a : from to b`.
    pub(crate) fn convert(&mut self, op: &str, a: Val, elem: Elem) -> Val {
        let to = Type(elem, a.width);
        self.def(to, format_args!("{op} {a} : {} to {to}", a.ty()))
    }

    /// A float comparison by its MLIR predicate, such as `olt`.
    pub(crate) fn cmpf(&mut self, predicate: &str, a: Val, b: Val) -> Val {
        let ty = Type(Elem::I1, a.width);
        self.def(ty, format_args!("arith.cmpf {predicate}, {a}, {b} : {}", a.ty()))
    }

    /// An integer comparison by its MLIR predicate, such as `slt`.
    pub(crate) fn cmpi(&mut self, predicate: &str, a: Val, b: Val) -> Val {
        let ty = Type(Elem::I1, a.width);
        self.def(ty, format_args!("arith.cmpi {predicate}, {a}, {b} : {}", a.ty()))
    }

    /// `a` where the condition holds, else `b`.
    pub(crate) fn select(&mut self, condition: Val, a: Val, b: Val) -> Val {
        let ty = a.ty();
        let of = if condition.width == 1 { String::new() } else { format!("{}, ", condition.ty()) };
        self.def(ty, format_args!("arith.select {condition}, {a}, {b} : {of}{ty}"))
    }

    /// A vector of equal lanes; a scalar if the width is 1.
    pub(crate) fn broadcast(&mut self, a: Val, width: usize) -> Val {
        if a.width == width {
            return a;
        }
        let to = Type(a.elem, width);
        self.def(to, format_args!("vector.broadcast {a} : {} to {to}", a.ty()))
    }

    /// Opens `for i in from..to step by` with carried values.
    pub(crate) fn open_for(&mut self, [from, to, by]: [Val; 3], carried: &[Val]) -> Loop {
        let index = self.name(Type(Elem::Index, 1));
        let carried_in: Vec<Val> = carried.iter().map(|c| self.name(c.ty())).collect();
        let result = self.name(Type(Elem::Index, 1));
        if carried.is_empty() {
            self.line(format_args!("scf.for {index} = {from} to {to} step {by} {{"));
        } else {
            let inits = list(carried_in.iter().zip(carried).map(|(a, c)| format!("{a} = {c}")));
            let (n, types) = (carried.len(), list(carried.iter().map(|c| c.ty())));
            self.line(format_args!(
                "{result}:{n} = scf.for {index} = {from} to {to} step {by} iter_args({inits}) -> \
                 ({types}) {{"
            ));
        }
        Loop { index, carried: carried_in, result }
    }

    /// Closes a loop with the carried values of its next iteration; returns those after the last.
    pub(crate) fn close_for(&mut self, open: Loop, next: &[Val]) -> Vec<Val> {
        if !next.is_empty() {
            let types = list(next.iter().map(|c| c.ty()));
            self.line(format_args!("scf.yield {} : {types}", list(next)));
        }
        self.close();
        let part = |(k, c): (usize, &Val)| Val { id: open.result.id, part: Some(k as u32), ..*c };
        open.carried.iter().enumerate().map(part).collect()
    }

    /// Opens a block that runs only where the condition holds.
    pub(crate) fn open_if(&mut self, condition: Val) {
        self.line(format_args!("scf.if {condition} {{"));
    }

    /// Closes a block.
    pub(crate) fn close(&mut self) {
        self.line(format_args!("}}"));
    }
}

/// An open loop.
pub(crate) struct Loop {
    /// The loop's variable.
    pub(crate) index: Val,
    /// The carried values of this iteration.
    pub(crate) carried: Vec<Val>,
    result: Val,
}

fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
}
