//! Kinds of values that keys accept, with parsing from and printing to TOML.

pub(super) const INF: f64 = f64::INFINITY;

/// The least number above zero: plans hold numbers in f32.
pub(super) const TINY: f64 = f32::MIN_POSITIVE as f64;

/// Most micro-steps of a step, and most of anything else that is counted within one.
pub(super) const COUNT: u64 = 1 << 20;

/// The optimizers among which a parameter group chooses.
pub(super) const GROUP_KINDS: &[&str] = &["muon", "adamw"];

/// The word that leaves a choice to the compiler.
pub(super) const AUTO: &str = "auto";

/// What values a key takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A whole number between these, both included.
    Integer(u64, u64),
    /// A number between these, both included; without an upper bound, any that an f32 holds.
    Number(f64, f64),
    /// `true` or `false`.
    Boolean,
    /// Any text.
    Text,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// One of these words, or `auto`.
    ChoiceOrAuto(&'static [&'static str]),
    /// A float type: `fp32`, `fp16` or `bf16` (`f32` and `f16` are read too), or one of these words.
    Float(&'static [&'static str]),
    /// One of these words, or a number between the bounds.
    ChoiceOrNumber(&'static [&'static str], f64, f64),
    /// One of these words, or a whole number of at least this.
    ChoiceOrInteger(&'static [&'static str], i64),
    /// A number of bytes such as `16e9` or `"24GiB"`, or one of these words.
    Bytes(&'static [&'static str]),
    /// Two numbers, each in `[0, 1)`.
    Pair,
    /// Three numbers of either sign.
    Triple,
    /// A list of texts.
    List,
    /// A list of texts, or a whole number N, which is read as the text `**=N`.
    ListOrInteger,
}

/// A value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number.
    Integer(u64),
    /// A whole number of either sign.
    Signed(i64),
    /// A number.
    Number(f64),
    /// `true` or `false`.
    Boolean(bool),
    /// A text or word.
    Text(String),
    /// Two numbers.
    Pair([f64; 2]),
    /// Three numbers.
    Triple([f64; 3]),
    /// A list of texts.
    List(Vec<String>),
}

impl Kind {
    /// The value, if it is of this kind.
    pub(super) fn read(&self, value: &toml::Value) -> Option<Value> {
        let number = match value {
            toml::Value::Integer(i) => Some(*i as f64),
            toml::Value::Float(x) => Some(*x),
            _ => None,
        };
        let text = value.as_str();
        match *self {
            Kind::Integer(min, max) => {
                let whole = whole(value).and_then(|i| u64::try_from(i).ok());
                whole.filter(|n| (min..=max).contains(n)).map(Value::Integer)
            }
            Kind::Number(min, max) => number.filter(|x| within(*x, min, max)).map(Value::Number),
            Kind::Boolean => value.as_bool().map(Value::Boolean),
            Kind::Text => text.map(|s| Value::Text(s.into())),
            Kind::Choice(words) => {
                text.filter(|s| words.contains(s)).map(|s| Value::Text(s.into()))
            }
            Kind::ChoiceOrAuto(words) => {
                let known = |s: &&str| words.contains(s) || *s == AUTO;
                text.filter(known).map(|s| Value::Text(s.into()))
            }
            Kind::Float(words) => text.and_then(|s| match s {
                s if words.contains(&s) => Some(Value::Text(s.into())),
                s => float_name(s).map(|name| Value::Text(name.into())),
            }),
            Kind::ChoiceOrNumber(words, min, max) => text
                .filter(|s| words.contains(s))
                .map(|s| Value::Text(s.into()))
                .or(number.filter(|x| within(*x, min, max)).map(Value::Number)),
            Kind::ChoiceOrInteger(words, min) => text
                .filter(|s| words.contains(s))
                .map(|s| Value::Text(s.into()))
                .or(whole(value).filter(|n| *n >= min).map(Value::Signed)),
            Kind::Bytes(words) => match text {
                Some(s) if words.contains(&s) => Some(Value::Text(s.into())),
                Some(s) => bytes(s).map(Value::Number),
                None => number.filter(|x| within(*x, 0.0, 1e18)).map(Value::Number),
            },
            Kind::Pair => {
                let pair: [f64; 2] = numbers(value)?.try_into().ok()?;
                let fits = pair.iter().all(|x| (0.0..1.0).contains(x));
                fits.then_some(Value::Pair(pair))
            }
            Kind::Triple => {
                let triple: [f64; 3] = numbers(value)?.try_into().ok()?;
                let fits = triple.iter().all(|x| within(x.abs(), 0.0, INF));
                fits.then_some(Value::Triple(triple))
            }
            Kind::List => texts(value),
            Kind::ListOrInteger => match whole(value) {
                Some(n) => Some(Value::List(vec![format!("**={n}")])),
                None => texts(value),
            },
        }
    }

    /// The type in words.
    pub fn describe(&self) -> String {
        let list = |words: &[&str]| {
            words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(", ")
        };
        let range = |min: f64, max: f64| match (min, max) {
            (min, max) if min == TINY && max == INF => {
                "a number above 0 and below 3.4e38".to_string()
            }
            (min, max) if min == TINY => format!("a number above 0, at most {max}"),
            (min, max) if max == INF => format!("a number of at least {min} and below 3.4e38"),
            (min, max) => format!("a number from {min} to {max}"),
        };
        match *self {
            Kind::Integer(min, max) => format!("a whole number from {min} to {max}"),
            Kind::Number(min, max) => range(min, max),
            Kind::Boolean => "true or false".into(),
            Kind::Text => "a text".into(),
            Kind::Choice(words) => format!("one of {}", list(words)),
            Kind::ChoiceOrAuto(words) => format!("one of {}, \"{AUTO}\"", list(words)),
            Kind::Float(&[]) => "one of \"fp32\", \"bf16\", \"fp16\"".into(),
            Kind::Float(words) => {
                format!("one of {}, \"fp32\", \"bf16\", \"fp16\"", list(words))
            }
            Kind::ChoiceOrInteger(&[], _) => "a whole number".into(),
            Kind::ChoiceOrInteger(words, i64::MIN) => format!("{} or a whole number", list(words)),
            Kind::ChoiceOrInteger(words, min) => {
                format!("{} or a whole number of at least {min}", list(words))
            }
            Kind::ChoiceOrNumber(words, min, max) => {
                format!("{} or {}", list(words), range(min, max))
            }
            Kind::Bytes(words) => format!("{} or bytes such as \"24GiB\"", list(words)),
            Kind::Pair => "two numbers from 0 to below 1".into(),
            Kind::Triple => "three numbers".into(),
            Kind::List => "a list of strings".into(),
            Kind::ListOrInteger => "a list of strings or a whole number".into(),
        }
    }
}

/// The whole number that the value is; `1e4` is one too.
fn whole(value: &toml::Value) -> Option<i64> {
    match value {
        toml::Value::Integer(i) => Some(*i),
        toml::Value::Float(x) if x.fract() == 0.0 && x.abs() < 9e15 => Some(*x as i64),
        _ => None,
    }
}

fn numbers(value: &toml::Value) -> Option<Vec<f64>> {
    let number = |v: &toml::Value| v.as_float().or(v.as_integer().map(|i| i as f64));
    value.as_array()?.iter().map(number).collect()
}

fn texts(value: &toml::Value) -> Option<Value> {
    let list = value.as_array()?.iter().map(|v| v.as_str().map(String::from));
    list.collect::<Option<_>>().map(Value::List)
}

fn within(x: f64, min: f64, max: f64) -> bool {
    x >= min && x <= max.min(f32::MAX.into())
}

/// The configuration's spelling of a float type that can be computed in.
pub(super) fn float_name(text: &str) -> Option<&'static str> {
    match text {
        "fp32" | "f32" => Some("fp32"),
        "fp16" | "f16" => Some("fp16"),
        "bf16" => Some("bf16"),
        _ => None,
    }
}

/// Units of bytes.
pub(super) const UNITS: [(&str, f64); 9] = [
    ("B", 1.0),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
];

fn bytes(text: &str) -> Option<f64> {
    let at = text.find(|c: char| c.is_ascii_alphabetic() && c != 'e').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor = match unit.trim() {
        "" => 1.0,
        unit => UNITS.iter().find(|(name, _)| *name == unit)?.1,
    };
    let n: f64 = number.trim().parse().ok()?;
    Some((n * factor).floor()).filter(|x| within(*x, 0.0, 1e18))
}

impl Value {
    /// The value as TOML.
    pub fn to_toml(&self) -> String {
        let number = |x: f64| match x {
            x if x.fract() == 0.0 && x.abs() < 1e15 => format!("{x:.1}"),
            x => toml::Value::Float(x).to_string(),
        };
        match self {
            Value::Integer(i) => i.to_string(),
            Value::Signed(i) => i.to_string(),
            Value::Number(x) => number(*x),
            Value::Boolean(b) => b.to_string(),
            Value::Text(s) => toml::Value::String(s.clone()).to_string(),
            Value::Pair([a, b]) => format!("[{}, {}]", number(*a), number(*b)),
            Value::Triple([a, b, c]) => {
                format!("[{}, {}, {}]", number(*a), number(*b), number(*c))
            }
            Value::List(list) => {
                let list: Vec<String> =
                    list.iter().map(|s| toml::Value::String(s.clone()).to_string()).collect();
                format!("[{}]", list.join(", "))
            }
        }
    }
}
