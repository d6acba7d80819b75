//! A small PTX interpreter, so that CUDA kernels can be executed without a GPU.
//!
//! It supports the instructions that the kernels use and panics at any other. Threads of a block run in turn up to the
//! next barrier or shuffle; an access outside an operand fails the test. Source: PTX ISA 8.0.

use frit_codegen::CudaModule;
use frit_ir::Tensor;
use frit_ir::plan::CudaLaunch;
use half::{bf16, f16};
use std::collections::HashMap;

#[derive(Clone, Debug)]
enum Arg {
    Reg(usize),
    Imm(u64),
    /// Address in a register, plus an offset.
    Mem(Box<Arg>, i64),
    Pack(Vec<Arg>),
}

struct Instruction {
    guard: Option<(usize, bool)>,
    op: Vec<String>,
    args: Vec<Arg>,
    text: String,
}

struct Program {
    code: Vec<Instruction>,
    labels: HashMap<String, usize>,
    registers: usize,
    shared: usize,
}

/// Distance between operands in the interpreter's memory.
const SPACE: u64 = 1 << 40;
/// Registers that hold the thread's index, the block's in x and y, and the number of blocks in x.
const TID: usize = 0;
const CTAID: [usize; 2] = [1, 2];
const NCTAID: usize = 3;

struct Parser {
    names: HashMap<String, usize>,
    symbols: HashMap<String, u64>,
}

impl Parser {
    fn register(&mut self, name: &str) -> usize {
        let next = self.names.len();
        *self.names.entry(name.into()).or_insert(next)
    }

    fn arg(&mut self, text: &str) -> Arg {
        let text = text.trim();
        if let Some(list) = text.strip_prefix('{') {
            return Arg::Pack(list.trim_end_matches('}').split(',').map(|a| self.arg(a)).collect());
        }
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner.trim_end_matches(']');
            let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
            let offset = offset.trim_start_matches('+').parse().unwrap();
            return Arg::Mem(Box::new(self.arg(base)), offset);
        }
        if text.starts_with('%') {
            return Arg::Reg(self.register(text));
        }
        if let Some(hex) = text.strip_prefix("0f").or(text.strip_prefix("0d")) {
            return Arg::Imm(u64::from_str_radix(hex, 16).unwrap());
        }
        if let Some(hex) = text.trim_end_matches('U').strip_prefix("0x") {
            return Arg::Imm(u64::from_str_radix(hex, 16).unwrap());
        }
        if let Ok(int) = text.parse::<i64>() {
            return Arg::Imm(int as u64);
        }
        let address = self.symbols.get(text);
        Arg::Imm(*address.unwrap_or_else(|| panic!("unknown name {text}")))
    }
}

/// Splits at commas outside of braces.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().unwrap().push(c);
    }
    parts.into_iter().map(|p| p.trim().to_string()).filter(|p| !p.is_empty()).collect()
}

/// The entry of this name, which takes `n` pointers, and the shared memory before it; of that `dynamic` bytes are the launch's.
fn parse(text: &str, entry: &str, n: usize, dynamic: u32) -> Program {
    let mut parser = Parser { names: HashMap::new(), symbols: HashMap::new() };
    assert_eq!(parser.register("%tid.x"), TID);
    assert_eq!(["%ctaid.x", "%ctaid.y"].map(|name| parser.register(name)), CTAID);
    assert_eq!(parser.register("%nctaid.x"), NCTAID);
    for i in 0..n {
        parser.symbols.insert(format!("{entry}_param_{i}"), (i as u64 + 1) * SPACE);
    }
    let mut inside = false;
    let mut shared = 0;
    let (mut code, mut labels) = (Vec::new(), HashMap::new());
    for line in text.lines() {
        let line = line.split("//").next().unwrap().trim();
        if line.contains(".entry") {
            inside = line.contains(&format!(".entry {entry}("));
        }
        if line.trim_start_matches(".extern ").starts_with(".shared") {
            let name = line.split_whitespace().last().unwrap().trim_end_matches(';');
            let (name, size) = name.trim_end_matches(']').split_once('[').unwrap();
            parser.symbols.insert(name.into(), shared);
            let size = if size.is_empty() { dynamic.into() } else { size.parse::<u64>().unwrap() };
            shared += size.next_multiple_of(16);
        }
        if !inside {
            continue;
        }
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label.to_string(), code.len());
        }
        if !line.ends_with(';') || line.starts_with('.') {
            continue;
        }
        let mut rest = line.trim_end_matches(';');
        let mut guard = None;
        if let Some(guarded) = rest.strip_prefix('@') {
            let (register, after) = guarded.split_once(' ').unwrap();
            let name = register.trim_start_matches('!');
            guard = Some((parser.register(name), !register.starts_with('!')));
            rest = after.trim();
        }
        let (op, args) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let op: Vec<String> = op.split('.').map(String::from).collect();
        let args = if op[0] == "bra" {
            vec![]
        } else {
            split(args).iter().map(|a| parser.arg(a)).collect()
        };
        code.push(Instruction { guard, op, args, text: line.into() });
    }
    Program { code, labels, registers: parser.names.len(), shared: shared as usize }
}

struct Thread {
    pc: usize,
    registers: Vec<u64>,
    done: bool,
}

struct Machine<'p> {
    program: &'p Program,
    buffers: Vec<Vec<u8>>,
    shared: Vec<u8>,
    /// Blocks in x.
    wide: u32,
}

/// Runs the module's first kernel on the operands and returns its results. What a grid-stride loop computes must
/// not depend on the number of blocks.
pub(crate) fn run(module: &CudaModule, inputs: &[Tensor]) -> Vec<Tensor> {
    let results = run_with(module, inputs, u32::MAX);
    if module.kernels[0].launches.iter().any(|l| l.grid_stride && l.grid[0] > 1) {
        let bytes = |t: Vec<Tensor>| t.iter().map(Tensor::to_bytes).collect::<Vec<_>>();
        let most_blocks = 2.min(module.kernels[0].launches[0].grid[0] - 1);
        assert_eq!(bytes(run_with(module, inputs, most_blocks)), bytes(results.clone()));
    }
    results
}

fn run_with(module: &CudaModule, inputs: &[Tensor], most_blocks: u32) -> Vec<Tensor> {
    let kernel = &module.kernels[0];
    let mut buffers: Vec<Vec<u8>> = inputs.iter().map(Tensor::to_bytes).collect();
    buffers.extend(kernel.results.iter().map(|t| vec![0xA5; t.bytes()]));
    buffers.extend((kernel.scratch_bytes > 0).then(|| vec![0xA5; kernel.scratch_bytes]));
    for launch in &kernel.launches {
        let CudaLaunch { symbol, grid: [wide, high], block, shared_bytes, grid_stride } = launch;
        let program = parse(&module.ptx, symbol, buffers.len(), *shared_bytes);
        let wide = if *grid_stride { *wide.min(&most_blocks) } else { *wide };
        let mut machine = Machine { program: &program, buffers, shared: Vec::new(), wide };
        for y in 0..*high {
            for x in 0..wide {
                machine.block([x.into(), y.into()], u64::from(*block));
            }
        }
        buffers = machine.buffers;
    }
    let results = buffers[inputs.len()..].iter().zip(&kernel.results);
    results.map(|(bytes, ty)| Tensor::from_bytes(ty.clone(), bytes).unwrap()).collect()
}

impl Machine<'_> {
    fn block(&mut self, block: [u64; 2], n: u64) {
        self.shared = vec![0xA5; self.program.shared];
        let mut threads: Vec<Thread> = (0..n)
            .map(|tid| {
                let mut registers = vec![0; self.program.registers];
                registers[TID] = tid;
                registers[NCTAID] = self.wide.into();
                CTAID.iter().zip(block).for_each(|(&r, index)| registers[r] = index);
                Thread { pc: 0, registers, done: false }
            })
            .collect();
        while threads.iter().any(|t| !t.done) {
            threads.iter_mut().for_each(|t| self.until_wait(t));
            let waits = |t: &Thread, op: &str| !t.done && self.program.code[t.pc].op[0] == op;
            let mut shuffled = false;
            for warp in threads.chunks_mut(32) {
                if warp.iter().any(|t| waits(t, "shfl")) {
                    let pc = warp[0].pc;
                    if warp.iter().all(|t| t.pc == pc && !t.done) {
                        shuffle(&self.program.code[pc], warp);
                        shuffled = true;
                    }
                }
            }
            if shuffled || threads.iter().all(|t| t.done) {
                continue;
            }
            // No thread is at a shuffle, so all running threads must be at the barrier.
            assert!(threads.iter().all(|t| waits(t, "bar")), "not all threads reach a barrier");
            threads.iter_mut().for_each(|t| t.pc += 1);
        }
    }

    fn until_wait(&mut self, t: &mut Thread) {
        while !t.done {
            let instruction = &self.program.code[t.pc];
            if matches!(instruction.op[0].as_str(), "bar" | "shfl") {
                return;
            }
            t.pc += 1;
            if let Some((register, on)) = instruction.guard
                && (t.registers[register] != 0) != on
            {
                continue;
            }
            match instruction.op[0].as_str() {
                "bra" => {
                    let text = instruction.text.trim_end_matches(';');
                    t.pc = self.program.labels[text.split_whitespace().last().unwrap()];
                }
                "ret" => t.done = true,
                "ld" | "st" => self.memory(t, instruction),
                "prefetch" => self.prefetch(t, instruction),
                _ => compute(&mut t.registers, instruction),
            }
        }
    }

    fn prefetch(&self, t: &Thread, i: &Instruction) {
        let Arg::Mem(base, offset) = &i.args[0] else { panic!("{}", i.text) };
        let at = value(&t.registers, base).wrapping_add(*offset as u64);
        let buffer = &self.buffers[(at / SPACE) as usize - 1];
        assert!(((at % SPACE) as usize) < buffer.len(), "outside of memory: {}", i.text);
    }

    fn memory(&mut self, t: &mut Thread, i: &Instruction) {
        let size = bits(i.op.last().unwrap()) / 8;
        let (is_load, address, data) = match (&i.args[0], &i.args[1]) {
            (Arg::Mem(base, offset), data) => {
                (false, value(&t.registers, base).wrapping_add(*offset as u64), data)
            }
            (data, Arg::Mem(base, offset)) => {
                (true, value(&t.registers, base).wrapping_add(*offset as u64), data)
            }
            _ => panic!("{}", i.text),
        };
        if i.op[1] == "param" {
            set(&mut t.registers, data, address, 64);
            return;
        }
        let lanes = if let Arg::Pack(list) = data { list.clone() } else { vec![data.clone()] };
        assert_eq!(address % (size * lanes.len() as u64), 0, "misaligned: {}", i.text);
        for (k, lane) in lanes.iter().enumerate() {
            let at = address + k as u64 * size;
            let memory = match i.op[1].as_str() {
                "shared" => &mut self.shared,
                _ => &mut self.buffers[(at / SPACE) as usize - 1],
            };
            let at = (at % SPACE) as usize;
            let bytes = memory.get_mut(at..at + size as usize).unwrap_or_else(|| {
                panic!("thread {} outside of memory: {}", t.registers[TID], i.text)
            });
            if is_load {
                let mut word = [0; 8];
                word[..size as usize].copy_from_slice(bytes);
                set(&mut t.registers, lane, u64::from_le_bytes(word), 8 * size);
            } else {
                bytes.copy_from_slice(&value(&t.registers, lane).to_le_bytes()[..size as usize]);
            }
        }
    }
}

/// `shfl.sync.bfly d, value, distance, 31, −1`.
fn shuffle(i: &Instruction, warp: &mut [Thread]) {
    assert_eq!(i.op[1..3], ["sync", "bfly"], "{}", i.text);
    let values: Vec<u64> = warp.iter().map(|t| value(&t.registers, &i.args[1])).collect();
    for (lane, t) in warp.iter_mut().enumerate() {
        let other = lane ^ value(&t.registers, &i.args[2]) as usize;
        set(&mut t.registers, &i.args[0], values[other], 32);
        t.pc += 1;
    }
}

fn bits(ty: &str) -> u64 {
    match ty {
        "pred" => 1,
        "bf16" | "f16" => 16,
        "bf16x2" | "f16x2" => 32,
        _ => ty[1..].parse().unwrap_or_else(|_| panic!("type {ty}")),
    }
}

fn value(registers: &[u64], arg: &Arg) -> u64 {
    match arg {
        Arg::Reg(r) => registers[*r],
        Arg::Imm(x) => *x,
        Arg::Mem(..) | Arg::Pack(_) => panic!("no scalar"),
    }
}

fn set(registers: &mut [u64], arg: &Arg, value: u64, bits: u64) {
    let Arg::Reg(r) = arg else { panic!("no register") };
    registers[*r] = if bits == 64 { value } else { value & ((1 << bits) - 1) };
}

fn signed(x: u64, bits: u64) -> i64 {
    (x << (64 - bits)) as i64 >> (64 - bits)
}

fn compute(registers: &mut [u64], i: &Instruction) {
    let op = i.op[0].as_str();
    let ty = i.op.last().unwrap().as_str();
    if op == "mov" {
        return move_bits(registers, i, ty);
    }
    let operands: Vec<u64> = i.args[1..].iter().map(|a| value(registers, a)).collect();
    let n = bits(ty);
    let (result, width) = match op {
        "cvta" => (operands[0], 64),
        "selp" => (if operands[2] != 0 { operands[0] } else { operands[1] }, n),
        "cvt" => (convert(&operands, &i.op, &i.text), bits(&i.op[i.op.len() - 2])),
        "setp" => (u64::from(compare(&i.op[1], ty, operands[0], operands[1])), 1),
        "copysign" => {
            let sign = 1 << (n - 1);
            (operands[0] & sign | operands[1] & (sign - 1), n)
        }
        _ if ty == "f32" => {
            let x: Vec<f32> = operands.iter().map(|&b| f32::from_bits(b as u32)).collect();
            (u64::from(float(op, &i.op, &x, &i.text).to_bits()), 32)
        }
        _ if ty == "f64" => {
            let x: Vec<f64> = operands.iter().map(|&b| f64::from_bits(b)).collect();
            (double(op, &x, &i.text).to_bits(), 64)
        }
        _ => integer(op, &i.op, ty, &operands, &i.text),
    };
    set(registers, &i.args[0], result, width);
}

fn move_bits(registers: &mut [u64], i: &Instruction, ty: &str) {
    let n = bits(ty);
    match (&i.args[0], &i.args[1]) {
        (Arg::Pack(list), from) => {
            let (word, part) = (value(registers, from), n / list.len() as u64);
            for (k, to) in list.iter().enumerate() {
                set(registers, to, word >> (part * k as u64), part);
            }
        }
        (to, Arg::Pack(list)) => {
            let part = n / list.len() as u64;
            let word = list
                .iter()
                .enumerate()
                .fold(0, |word, (k, from)| word | value(registers, from) << (part * k as u64));
            set(registers, to, word, n);
        }
        (to, from) => {
            let word = value(registers, from);
            set(registers, to, word, n);
        }
    }
}

fn float(op: &str, parts: &[String], x: &[f32], text: &str) -> f32 {
    let nan = parts.iter().any(|p| p == "NaN") && x.iter().any(|x| x.is_nan());
    match op {
        _ if nan => f32::NAN,
        "add" => x[0] + x[1],
        "sub" => x[0] - x[1],
        "mul" => x[0] * x[1],
        "fma" if parts.iter().any(|p| p == "sat") => {
            let sum = x[0].mul_add(x[1], x[2]);
            if sum.is_nan() { 0.0 } else { sum.clamp(0.0, 1.0) }
        }
        "fma" => x[0].mul_add(x[1], x[2]),
        "div" => x[0] / x[1],
        "rcp" => 1.0 / x[0],
        "ex2" => approximate_exp2(flush(x[0])),
        "sqrt" => x[0].sqrt(),
        "neg" => -x[0],
        "abs" => x[0].abs(),
        "max" => x[0].max(x[1]),
        "min" => x[0].min(x[1]),
        _ => panic!("{text}"),
    }
}

/// `ex2.approx` is exact for integers and within 2 ulp otherwise: as far off as it may be, in either direction.
fn approximate_exp2(x: f32) -> f32 {
    let exact = x.exp2();
    if x.fract() == 0.0 || !exact.is_finite() {
        return flush(exact);
    }
    let off = if x.to_bits().count_ones().is_multiple_of(2) { 2 } else { -2 };
    flush(f32::from_bits(exact.to_bits().saturating_add_signed(off)))
}

/// Subnormal numbers are zero.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

fn double(op: &str, x: &[f64], text: &str) -> f64 {
    match op {
        "add" => x[0] + x[1],
        "sub" => x[0] - x[1],
        "mul" => x[0] * x[1],
        "fma" => x[0].mul_add(x[1], x[2]),
        "div" => x[0] / x[1],
        "neg" => -x[0],
        "abs" => x[0].abs(),
        _ => panic!("{text}"),
    }
}

fn integer(op: &str, parts: &[String], ty: &str, x: &[u64], text: &str) -> (u64, u64) {
    let n = bits(ty);
    let is_signed = ty.starts_with('s');
    let mask = if n == 64 { u64::MAX } else { (1 << n) - 1 };
    let wide = |x: u64| -> i128 { if is_signed { signed(x, n).into() } else { (x & mask).into() } };
    let has = |what: &str| parts.iter().any(|p| p == what);
    let result = match op {
        "add" => x[0].wrapping_add(x[1]),
        "sub" => x[0].wrapping_sub(x[1]),
        "mul" if has("wide") => return ((wide(x[0]) * wide(x[1])) as u64, 2 * n),
        "mul" if has("hi") => ((wide(x[0]) * wide(x[1])) >> n) as u64,
        "mul" => x[0].wrapping_mul(x[1]),
        "mad" if has("wide") => {
            return (((wide(x[0]) * wide(x[1])) as u64).wrapping_add(x[2]), 2 * n);
        }
        "mad" => x[0].wrapping_mul(x[1]).wrapping_add(x[2]),
        "div" => (wide(x[0]) / wide(x[1])) as u64,
        "rem" => (wide(x[0]) % wide(x[1])) as u64,
        "min" => wide(x[0]).min(wide(x[1])) as u64,
        "max" => wide(x[0]).max(wide(x[1])) as u64,
        "bfe" if !is_signed => (x[0] >> x[1]) & ((1 << x[2]) - 1),
        "prmt" => (0..4).fold(0, |word, k| {
            let (both, pick) = (x[1] << 32 | x[0] & 0xFFFF_FFFF, x[2] >> (4 * k));
            let byte = both >> (8 * (pick & 7));
            let byte =
                if pick & 8 == 0 { byte & 0xFF } else { (signed(byte, 8) >> 7) as u64 & 0xFF };
            word | byte << (8 * k)
        }),
        "neg" => x[0].wrapping_neg(),
        "and" => x[0] & x[1],
        "or" => x[0] | x[1],
        "xor" => x[0] ^ x[1],
        "not" => !x[0],
        "shl" => {
            if x[1] < n {
                x[0] << x[1]
            } else {
                0
            }
        }
        "shr" if is_signed => (signed(x[0], n) >> x[1].min(63)) as u64,
        "shr" => {
            if x[1] < n {
                (x[0] & mask) >> x[1]
            } else {
                0
            }
        }
        _ => panic!("{text}"),
    };
    (result, n)
}

fn compare(predicate: &str, ty: &str, a: u64, b: u64) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let n = bits(ty);
    let order = match ty.as_bytes()[0] {
        b'f' if n == 64 => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
        b'f' => f32::from_bits(a as u32).partial_cmp(&f32::from_bits(b as u32)),
        b's' => Some(signed(a, n).cmp(&signed(b, n))),
        _ => Some((a << (64 - n)).cmp(&(b << (64 - n)))),
    };
    let unordered = order.is_none();
    match predicate {
        "eq" => order == Some(Equal),
        "ne" => !unordered && order != Some(Equal),
        "lt" | "lo" => order == Some(Less),
        "le" | "ls" => matches!(order, Some(Less | Equal)),
        "gt" | "hi" => order == Some(Greater),
        "ge" | "hs" => matches!(order, Some(Greater | Equal)),
        "equ" => unordered || order == Some(Equal),
        "neu" => order != Some(Equal),
        "ltu" => unordered || order == Some(Less),
        "leu" => order != Some(Greater),
        "gtu" => unordered || order == Some(Greater),
        "geu" => order != Some(Less),
        "nan" => unordered,
        "num" => !unordered,
        _ => panic!("comparison {predicate}"),
    }
}

fn convert(x: &[u64], op: &[String], text: &str) -> u64 {
    let (to, from) = (op[op.len() - 2].as_str(), op[op.len() - 1].as_str());
    let single = |x: u64| f32::from_bits(x as u32);
    let pair = |high: u16, low: u16| u64::from(high) << 16 | u64::from(low);
    match (to, from) {
        ("f64", "f32") => f64::from(single(x[0])).to_bits(),
        ("f32", "f64") => u64::from((f64::from_bits(x[0]) as f32).to_bits()),
        ("f64", "f64") if op[1] == "rmi" => f64::from_bits(x[0]).floor().to_bits(),
        ("f32", "f32") => {
            let x = single(x[0]);
            let whole = match op[1].as_str() {
                "rmi" => x.floor(),
                "rpi" => x.ceil(),
                "rni" => x.round_ties_even(),
                _ => panic!("{text}"),
            };
            u64::from(whole.to_bits())
        }
        ("f64", from) if from.starts_with('s') => (signed(x[0], bits(from)) as f64).to_bits(),
        ("f32", "bf16") => u64::from(bf16::from_bits(x[0] as u16).to_f32().to_bits()),
        ("f32", "f16") => u64::from(f16::from_bits(x[0] as u16).to_f32().to_bits()),
        ("bf16", "f32") => u64::from(bf16::from_f32(single(x[0])).to_bits()),
        ("f16", "f32") => u64::from(f16::from_f32(single(x[0])).to_bits()),
        ("bf16x2", "f32") => {
            let [high, low] = [0, 1].map(|k: usize| bf16::from_f32(single(x[k])).to_bits());
            pair(high, low)
        }
        ("f16x2", "f32") => {
            let [high, low] = [0, 1].map(|k: usize| f16::from_f32(single(x[k])).to_bits());
            pair(high, low)
        }
        ("f32", from) if from.starts_with('s') => {
            u64::from((signed(x[0], bits(from)) as f32).to_bits())
        }
        ("f32", "u32" | "u64" | "u16") => u64::from((x[0] as f32).to_bits()),
        // Out of range gives the minimum or maximum integer, NaN gives 0, as in Rust.
        (to, "f32") if to.starts_with('s') && op[1] == "rzi" => single(x[0]) as i64 as u64,
        (_, "f32" | "f64") | ("f32" | "f64", _) => panic!("{text}"),
        (_, from) if from.starts_with('s') => signed(x[0], bits(from)) as u64,
        (_, from) if bits(from) == 64 => x[0],
        (_, from) => x[0] & ((1 << bits(from)) - 1),
    }
}
