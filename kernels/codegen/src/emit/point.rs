//! Evaluates expressions at a point of the iteration space, each once per scope, as a scalar or a vector.

use super::arithmetic::{binary, compare, convert, elem, max};
use super::cuda_kept_row::{self, KeptRow};
use super::expr::{Expr, Id, Ty};
use super::load_store::{self, Access, Buffer, Memory};
use super::region::{Dependence, Program, Store, identity};
use super::text::{Elem, Text, Type, Val};
use super::view::Affine;
use frit_ir::ops::{CompareFn, LogicalFn, ReduceFn};
use std::collections::{HashMap, HashSet};

/// Values that are visible together.
#[derive(Default)]
pub(crate) struct Scope {
    values: HashMap<Id, Val>,
    vectors: HashMap<Id, Val>,
    bases: HashMap<(i64, Vec<i64>), Val>,
}

/// A buffer that stores an expression's values for one row.
#[derive(Clone, Copy)]
pub(crate) struct RowBuffer {
    pub(crate) memref: Val,
    /// Whether it has been filled for this row.
    pub(crate) filled: bool,
}

/// Writes one function.
pub(crate) struct Emitter<'p> {
    pub(crate) t: Text,
    pub(crate) program: &'p Program,
    pub(crate) width: usize,
    pub(crate) memory: Memory,
    /// Number of the function's argument that each operand and result is.
    pub(crate) arguments: Vec<usize>,
    /// Index of each row atom.
    pub(crate) rows: Vec<Val>,
    /// First column of the vector being computed, and its active lanes.
    pub(crate) col: Option<(Val, Option<Val>)>,
    /// Where the columns end that are being computed.
    pub(crate) end: usize,
    scopes: Vec<Scope>,
    pub(crate) row_buffers: HashMap<Id, RowBuffer>,
    /// Of a CUDA block: its row, and the dynamic shared memory of the kernel.
    pub(crate) kept_row: Option<KeptRow>,
    pub(crate) shared_bytes: usize,
}

impl<'p> Emitter<'p> {
    pub(crate) fn new(program: &'p Program, width: usize, memory: Memory) -> Self {
        Emitter {
            t: Text::new(memory.has_exp2),
            program,
            width,
            memory,
            arguments: (0..program.types.len()).collect(),
            rows: Vec::new(),
            col: None,
            end: program.cols(),
            scopes: vec![Scope::default()],
            row_buffers: HashMap::new(),
            kept_row: None,
            shared_bytes: 0,
        }
    }

    /// Runs `f` in a new scope, whose values are dropped afterwards.
    pub(crate) fn scope<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        self.scopes.push(Scope::default());
        let result = f(self);
        self.scopes.pop();
        result
    }

    /// Runs `f` at the columns from `col` on.
    pub(crate) fn at_col<R>(
        &mut self,
        col: Val,
        mask: Option<Val>,
        f: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let before = self.col.replace((col, mask));
        let result = self.scope(f);
        self.col = before;
        result
    }

    /// Runs `f` at the columns from `col` on, in a persistent scope: a later call with the same scope reuses its
    /// values. Only for code without loops between the calls.
    pub(crate) fn resume<R>(
        &mut self,
        col: Val,
        scope: &mut Scope,
        f: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let before = self.col.replace((col, None));
        self.scopes.push(std::mem::take(scope));
        let result = f(self);
        *scope = self.scopes.pop().expect("invariant: the scope just pushed");
        self.col = before;
        result
    }

    /// `for index in from..to step by`, with carried values.
    pub(crate) fn for_loop(
        &mut self,
        range: [Val; 3],
        carried: &[Val],
        f: impl FnOnce(&mut Self, Val, &[Val]) -> Vec<Val>,
    ) -> Vec<Val> {
        let open = self.t.open_for(range, carried);
        let next = self.scope(|e| f(e, open.index, &open.carried));
        self.t.close_for(open, &next)
    }

    /// Splits a flat row index into the indices of the row atoms.
    pub(crate) fn set_row(&mut self, row: Val) {
        let sizes = self.program.row_sizes().to_vec();
        let mut inner: usize = sizes.iter().product();
        self.rows = sizes
            .iter()
            .enumerate()
            .map(|(i, &size)| {
                inner /= size;
                let mut index = row;
                if inner > 1 {
                    let by = self.t.index(inner);
                    index = self.t.same("arith.divui", &[index, by]);
                }
                if i > 0 {
                    let by = self.t.index(size);
                    index = self.t.same("arith.remui", &[index, by]);
                }
                index
            })
            .collect();
    }

    /// Binds an expression to a value in the current scope.
    pub(crate) fn bind(&mut self, id: Id, val: Val) {
        self.scopes.last_mut().expect("invariant: a scope is open").values.insert(id, val);
    }

    /// Evaluates, in the current scope, every expression that `roots` depend on and that satisfies the condition, and
    /// the row part of every address, so that loops opened later reuse them.
    pub(crate) fn prepare(&mut self, roots: &[Id], keep: impl Fn(Dependence) -> bool) {
        let (mut stack, mut seen) = (roots.to_vec(), HashSet::new());
        stack.reverse();
        while let Some(id) = stack.pop() {
            if !seen.insert(id) || self.known(id).is_some() {
                continue;
            }
            if keep(self.program.depends(id)) {
                self.value(id);
                continue;
            }
            match self.program.dag.get(id) {
                Expr::Load { at, .. } => {
                    let row = at.strides[..self.program.n_rows()].iter().any(|&s| s != 0);
                    if keep(Dependence { row, col: false }) {
                        self.base(at);
                    }
                }
                Expr::Reduce(..) => {}
                _ => stack.extend(self.program.dag.operands(id).into_iter().rev()),
            }
        }
    }

    /// Evaluates everything that depends neither on the row nor on the column and is `wanted`.
    pub(crate) fn prepare_uniform(&mut self, wanted: impl Fn(Id) -> bool) {
        let uniform = |d: Dependence| !d.row && !d.col;
        for id in self.program.dag.ids() {
            let constant = matches!(self.program.dag.get(id), Expr::Float(_) | Expr::Int(..));
            let live = self.program.live[id.index()];
            if live && uniform(self.program.depends(id)) && !constant && wanted(id) {
                self.value(id);
            }
        }
    }

    fn known(&self, id: Id) -> Option<Val> {
        self.scopes.iter().rev().find_map(|s| s.values.get(&id).copied())
    }

    /// The value of an expression: a vector if it depends on the column, else a scalar.
    pub(crate) fn value(&mut self, id: Id) -> Val {
        if let Some(val) = self.known(id) {
            return val;
        }
        if let Some(buffer) = self.row_buffers.get(&id).copied()
            && let Some((col, _)) = self.col
        {
            let ty = Type(Elem::F32, self.width);
            let n = self.row_buffer_len();
            if buffer.filled {
                let m = buffer.memref;
                let val =
                    self.t.def(ty, format_args!("vector.load {m}[{col}] : memref<{n}xf32>, {ty}"));
                self.bind(id, val);
                return val;
            }
            let val = self.evaluate(id);
            let m = buffer.memref;
            self.t.line(format_args!("vector.store {val}, {m}[{col}] : memref<{n}xf32>, {ty}"));
            self.bind(id, val);
            return val;
        }
        let val = self.evaluate(id);
        self.bind(id, val);
        val
    }

    /// Elements of a row buffer: whole vectors, so that its accesses need no mask.
    pub(crate) fn row_buffer_len(&self) -> usize {
        self.program.cols().next_multiple_of(self.width)
    }

    /// The value as a vector.
    pub(crate) fn vector(&mut self, id: Id) -> Val {
        let val = self.value(id);
        if val.width == self.width {
            return val;
        }
        if let Some(val) = self.scopes.iter().rev().find_map(|s| s.vectors.get(&id).copied()) {
            return val;
        }
        let wide = self.t.broadcast(val, self.width);
        self.scopes.last_mut().expect("invariant: a scope is open").vectors.insert(id, wide);
        wide
    }

    fn evaluate(&mut self, id: Id) -> Val {
        let expr = self.program.dag.get(id).clone();
        let width = if self.program.depends(id).col { self.width } else { 1 };
        match expr {
            Expr::Load { operand, at } => self.load(id, operand, &at),
            Expr::Pick { operand, at, stride, index } => {
                let base = self.base(&at);
                let index = self.value(index);
                let index = self.t.convert("arith.index_cast", index, Elem::Index);
                let offset = self.scaled(index, stride);
                let index = self.t.same("arith.addi", &[base, offset]);
                let buffer = self.buffer(operand);
                load_store::load(&mut self.t, buffer, index, Access::scalar(), self.memory)
            }
            Expr::Index(at) => self.index(&at, width),
            Expr::Float(bits) => self.t.float(f32::from_bits(bits), 1),
            Expr::Int(x, ty) => self.t.int(x, elem(ty), 1),
            Expr::Un(f, a) => {
                let a = self.at_width(a, width);
                f.emit(&mut self.t, a)
            }
            Expr::Bin(f, a, b) => {
                let (a, b) = (self.at_width(a, width), self.at_width(b, width));
                binary(&mut self.t, f, a, b)
            }
            Expr::Fma(a, b, c) => {
                let operands = [a, b, c].map(|x| self.at_width(x, width));
                self.t.same("math.fma", &operands)
            }
            Expr::Compare(CompareFn::Lt, a, b) if self.is_below(a, b) => {
                self.t.int(1, Elem::I1, width)
            }
            Expr::Compare(f @ (CompareFn::Eq | CompareFn::Ne), a, b)
                if width > 1 && self.are_columns(a) && !self.program.depends(b).col =>
            {
                // Lanes beside how far the first is from `b`, which may wrap: one instruction for each.
                let (first, b) = (self.first_column(a), self.value(b));
                let distance = self.t.same("arith.subi", &[b, first]);
                let distance = self.t.broadcast(distance, width);
                let lanes = self.t.ramp(1, Elem::I32, width);
                compare(&mut self.t, f, lanes, distance)
            }
            Expr::Compare(f, a, b) => {
                let (a, b) = (self.at_width(a, width), self.at_width(b, width));
                compare(&mut self.t, f, a, b)
            }
            Expr::Logical(f, a, b) => {
                let (a, b) = (self.at_width(a, width), self.at_width(b, width));
                let op = match f {
                    LogicalFn::And => "arith.andi",
                    LogicalFn::Or => "arith.ori",
                    LogicalFn::Xor => "arith.xori",
                };
                self.t.same(op, &[a, b])
            }
            Expr::Select(c, a, b) => {
                let [c, a, b] = [c, a, b].map(|x| self.at_width(x, width));
                self.t.select(c, a, b)
            }
            Expr::Convert(ty, a) => {
                let a = self.at_width(a, width);
                convert(&mut self.t, a, ty)
            }
            Expr::Round(dtype, a) => {
                let a = self.at_width(a, width);
                load_store::round(&mut self.t, a, dtype, self.memory)
            }
            Expr::Reduce(..) => unreachable!("invariant: reductions are bound before their users"),
        }
    }

    /// Whether all columns being computed, if they are what `a` is, are below the number `b`.
    fn is_below(&self, a: Id, b: Id) -> bool {
        let (Expr::Index(at), Expr::Int(limit, _)) =
            (self.program.dag.get(a), self.program.dag.get(b))
        else {
            return false;
        };
        let (col, rows) = at.strides.split_last().expect("invariant: a space has a column");
        let is_column = at.constant == 0 && *col == 1 && rows.iter().all(|&stride| stride == 0);
        is_column && self.end as i64 <= *limit
    }

    /// Whether the expression is consecutive columns, as i32s.
    fn are_columns(&self, id: Id) -> bool {
        let Expr::Convert(Ty::I32, index) = self.program.dag.get(id) else { return false };
        matches!(self.program.dag.get(*index), Expr::Index(at) if self.col_stride(at) == 1)
    }

    /// The first of consecutive columns.
    fn first_column(&mut self, id: Id) -> Val {
        let Expr::Convert(_, index) = *self.program.dag.get(id) else {
            unreachable!("invariant: columns are a converted index")
        };
        let Expr::Index(at) = self.program.dag.get(index).clone() else {
            unreachable!("invariant: columns are a converted index")
        };
        let (first, _) = self.address(&at);
        self.t.convert("arith.index_cast", first, Elem::I32)
    }

    fn at_width(&mut self, id: Id, width: usize) -> Val {
        if width == 1 { self.value(id) } else { self.vector(id) }
    }

    pub(crate) fn buffer(&self, operand: usize) -> Buffer {
        let ty = &self.program.types[operand];
        Buffer { argument: self.arguments[operand], dtype: ty.dtype, len: ty.shape.numel() }
    }

    /// The part of an address that does not depend on the column.
    fn base(&mut self, at: &Affine) -> Val {
        let strides = at.strides[..self.program.n_rows()].to_vec();
        let key = (at.constant, strides.clone());
        if let Some(val) = self.scopes.iter().rev().find_map(|s| s.bases.get(&key).copied()) {
            return val;
        }
        let mut sum = self.t.int(at.constant, Elem::Index, 1);
        for (k, &stride) in strides.iter().enumerate() {
            if stride != 0 {
                let term = self.scaled(self.rows[k], stride);
                sum = self.t.same("arith.addi", &[sum, term]);
            }
        }
        self.scopes.last_mut().expect("invariant: a scope is open").bases.insert(key, sum);
        sum
    }

    fn scaled(&mut self, index: Val, stride: i64) -> Val {
        if stride == 1 {
            return index;
        }
        let by = self.t.int(stride, Elem::Index, 1);
        self.t.same("arith.muli", &[index, by])
    }

    fn col_stride(&self, at: &Affine) -> i64 {
        *at.strides.last().expect("invariant: a space has a column")
    }

    fn address(&mut self, at: &Affine) -> (Val, Access) {
        let base = self.base(at);
        let stride = self.col_stride(at);
        if stride == 0 {
            return (base, Access::scalar());
        }
        let (col, mask) = self.col.expect("invariant: columns are accessed inside a column loop");
        let offset = self.scaled(col, stride);
        let index = self.t.same("arith.addi", &[base, offset]);
        (index, Access { stride, width: self.width, mask })
    }

    fn load(&mut self, id: Id, operand: usize, at: &Affine) -> Val {
        let buffer = self.buffer(operand);
        let raw = cuda_kept_row::load(self, id, |e| {
            let (index, access) = e.address(at);
            load_store::read(&mut e.t, buffer, index, access, e.memory)
        });
        load_store::widen(&mut self.t, raw, buffer.dtype)
    }

    /// Lets a GPU bring what the current row has at the current columns from memory to L2.
    pub(crate) fn prefetch_row(&mut self) {
        let mut seen = HashSet::new();
        for id in self.program.dag.ids().filter(|id| self.program.live[id.index()]) {
            let Dependence { row, col } = self.program.depends(id);
            if let Expr::Load { operand, at } = self.program.dag.get(id).clone()
                && row
                && col
                && seen.insert((operand, at.constant, at.strides.clone()))
            {
                let (index, _) = self.address(&at);
                let buffer = self.buffer(operand);
                load_store::prefetch(&mut self.t, buffer, index, self.memory);
            }
        }
    }

    /// The affine form as an i64, per lane.
    fn index(&mut self, at: &Affine, width: usize) -> Val {
        let stride = self.col_stride(at);
        let (index, _) = self.address(at);
        let first = self.t.convert("arith.index_cast", index, Elem::I64);
        if width == 1 {
            return first;
        }
        let first = self.t.broadcast(first, width);
        let lanes = self.t.ramp(stride, Elem::I64, width);
        self.t.same("arith.addi", &[first, lanes])
    }

    /// Evaluates the results, then writes them: an operand may be overwritten by a result.
    pub(crate) fn store_all(&mut self, stores: &[Store]) {
        let values: Vec<Val> = stores
            .iter()
            .map(|s| match self.col_stride(&s.at) {
                0 => self.value(s.value),
                _ => self.vector(s.value),
            })
            .collect();
        for (store, value) in stores.iter().zip(values) {
            let (index, access) = self.address(&store.at);
            let buffer = self.buffer(store.operand);
            load_store::store(&mut self.t, value, buffer, index, access, self.memory);
        }
    }

    /// The neutral element of a reduction, `width` wide.
    pub(crate) fn identity(&mut self, reduction: Id, width: usize) -> Val {
        let (f, operand) = self.reduction(reduction);
        match identity(f, self.program.dag.ty(operand)) {
            Expr::Float(bits) => self.t.float(f32::from_bits(bits), width),
            Expr::Int(x, ty) => self.t.int(x, elem(ty), width),
            _ => unreachable!("invariant: neutral elements are constants"),
        }
    }

    /// Function and operand of a reduction.
    pub(crate) fn reduction(&self, id: Id) -> (ReduceFn, Id) {
        match *self.program.dag.get(id) {
            Expr::Reduce(f, _, operand) => (f, operand),
            _ => unreachable!("invariant: levels hold reductions"),
        }
    }

    /// `accumulator` combined with `value` in the active lanes.
    pub(crate) fn accumulate(&mut self, reduction: Id, accumulator: Val, mask: Option<Val>) -> Val {
        let (f, operand) = self.reduction(reduction);
        let value = self.vector(operand);
        let sum = self.combine(f, accumulator, value);
        match mask {
            Some(mask) => self.t.select(mask, sum, accumulator),
            None => sum,
        }
    }

    pub(crate) fn combine(&mut self, f: ReduceFn, a: Val, b: Val) -> Val {
        let float = a.elem == Elem::F32;
        let op = match (f, float) {
            (ReduceFn::Sum | ReduceFn::Mean, true) => "arith.addf",
            (ReduceFn::Prod, true) => "arith.mulf",
            (ReduceFn::Max, true) => return max(&mut self.t, "arith.maximumf", a, b),
            (ReduceFn::Min, true) => return max(&mut self.t, "arith.minimumf", a, b),
            (ReduceFn::Sum | ReduceFn::Mean, false) => "arith.addi",
            (ReduceFn::Prod, false) => "arith.muli",
            (ReduceFn::Max, false) => "arith.maxsi",
            (ReduceFn::Min, false) => "arith.minsi",
        };
        self.t.same(op, &[a, b])
    }

    /// Reduces all lanes to a scalar.
    pub(crate) fn across_lanes(&mut self, f: ReduceFn, a: Val) -> Val {
        if a.width == 1 {
            return a;
        }
        let float = a.elem == Elem::F32;
        let kind = match (f, float) {
            (ReduceFn::Sum | ReduceFn::Mean, _) => "add",
            (ReduceFn::Prod, _) => "mul",
            (ReduceFn::Max, true) => "maximumf",
            (ReduceFn::Min, true) => "minimumf",
            (ReduceFn::Max, false) => "maxsi",
            (ReduceFn::Min, false) => "minsi",
        };
        let to = Type(a.elem, 1);
        let flags = if float { " fastmath<reassoc>" } else { "" };
        self.t.def(to, format_args!("vector.reduction <{kind}>, {a}{flags} : {} into {to}", a.ty()))
    }
}
