//! One line of native JSONL: its fields and their types, before anything is checked across fields.

use serde::de::{Error as _, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// The fields of a line, in the order of the format's description.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    pub group_id: Label,
    pub trajectory_id: Option<Label>,
    pub prompt_ids: Option<Vec<i64>>,
    pub response_ids: Option<Vec<i64>>,
    pub observations: Option<serde_json::Value>,
    pub actions: Option<Vec<i64>>,
    pub response_mask: Option<Vec<Flag>>,
    #[serde(default, deserialize_with = "present")]
    pub reward: Option<Number>,
    pub token_rewards: Option<Vec<Number>>,
    pub old_logprobs: Option<Vec<Number>>,
    pub ref_logprobs: Option<Vec<Number>>,
    pub sampler_logprobs: Option<Vec<Number>>,
    pub values: Option<Vec<Number>>,
    pub reasoning: Option<Vec<(usize, usize)>>,
    pub step: Option<i64>,
    pub prompt: Option<String>,
    pub response: Option<String>,
    #[serde(rename = "meta")]
    pub _meta: Option<serde::de::IgnoredAny>,
}

/// The names a line may hold.
pub(super) const FIELDS: [&str; 18] = [
    "group_id",
    "trajectory_id",
    "prompt_ids",
    "response_ids",
    "observations",
    "actions",
    "response_mask",
    "reward",
    "token_rewards",
    "old_logprobs",
    "ref_logprobs",
    "sampler_logprobs",
    "values",
    "reasoning",
    "step",
    "prompt",
    "response",
    "meta",
];

/// A key that is there, if only as null.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Number>, D::Error> {
    Number::deserialize(deserializer).map(Some)
}

/// A number; null and NaN are NaN, and infinities, which Python writes, are themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Number(pub f64);

/// A mask entry: 0, 1, false or true.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag(pub bool);

/// An identifier: a string, or an integer taken for its digits.
#[derive(Debug)]
pub(super) struct Label(pub String);

struct NumberVisitor;

impl Visitor<'_> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("a number or null")
    }

    fn visit_f64<E>(self, value: f64) -> Result<Number, E> {
        Ok(Number(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Number, E> {
        Ok(Number(value as f64))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Number, E> {
        Ok(Number(value as f64))
    }

    fn visit_unit<E>(self) -> Result<Number, E> {
        Ok(Number(f64::NAN))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Number, E> {
        non_finite(value).map(Number).ok_or_else(|| E::invalid_type(Unexpected::Str(value), &self))
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct FlagVisitor;

impl Visitor<'_> for FlagVisitor {
    type Value = Flag;

    fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
        formatter.write_str("0, 1, false or true")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Flag, E> {
        Ok(Flag(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Flag, E> {
        match value {
            0 | 1 => Ok(Flag(value == 1)),
            _ => Err(E::invalid_value(Unexpected::Unsigned(value), &self)),
        }
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Flag, E> {
        Err(E::invalid_value(Unexpected::Signed(value), &self))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Flag, E> {
        if value == 0.0 || value == 1.0 {
            Ok(Flag(value == 1.0))
        } else {
            Err(E::invalid_value(Unexpected::Float(value), &self))
        }
    }
}

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FlagVisitor)
    }
}

impl<'de> Deserialize<'de> for Label {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(text)
                if !text.is_empty() && !text.contains(char::is_control) && !text.contains(MARK) =>
            {
                Ok(Self(text))
            }
            serde_json::Value::Number(number) if number.is_i64() || number.is_u64() => {
                Ok(Self(number.to_string()))
            }
            other => Err(D::Error::custom(format!(
                "expected a string without control characters, not empty, or an integer, found {other}"
            ))),
        }
    }
}

/// Stands before a word that is no JSON number; no JSON writer puts it into a file.
pub(super) const MARK: char = '\u{f8ff}';

/// Python's `json` writes NaN and infinities as bare words, which JSON does not know. Turns them
/// into marked strings that [`Number`] understands; strings are left alone.
pub(super) fn quote_non_finite(line: &str) -> std::borrow::Cow<'_, str> {
    if !line.contains("NaN") && !line.contains("Infinity") {
        return line.into();
    }
    let mut quoted = String::with_capacity(line.len() + 16);
    let mut rest = line;
    let mut in_string = false;
    while let Some(next) = rest.chars().next() {
        let word = ["NaN", "-Infinity", "Infinity"]
            .into_iter()
            .find(|word| !in_string && rest.starts_with(word));
        let taken = match word {
            Some(word) => {
                quoted.extend(['"', MARK]);
                quoted.push_str(word);
                quoted.push('"');
                word.len()
            }
            None => {
                let mut taken = next.len_utf8();
                if in_string && next == '\\' {
                    // The escaped character belongs to the string, a quotation mark too.
                    taken += rest[taken..].chars().next().map_or(0, char::len_utf8);
                } else if next == '"' {
                    in_string = !in_string;
                }
                quoted.push_str(&rest[..taken]);
                taken
            }
        };
        rest = &rest[taken..];
    }
    quoted.into()
}

fn non_finite(text: &str) -> Option<f64> {
    match text.strip_prefix(MARK)? {
        "NaN" => Some(f64::NAN),
        "Infinity" => Some(f64::INFINITY),
        "-Infinity" => Some(f64::NEG_INFINITY),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_words_of_python_are_numbers_and_strings_stay_as_they_are() {
        let line = r#"{"a": [NaN, -Infinity, Infinity], "b": "NaN \" NaN", "c": 1}"#;
        let value: serde_json::Value = serde_json::from_str(&quote_non_finite(line)).unwrap();
        let numbers: Vec<Number> = serde_json::from_value(value["a"].clone()).unwrap();
        assert!(numbers[0].0.is_nan());
        assert_eq!(numbers[1].0, f64::NEG_INFINITY);
        assert_eq!(numbers[2].0, f64::INFINITY);
        assert_eq!(value["b"], "NaN \" NaN");
        assert_eq!(value["c"], 1);
    }

    #[test]
    fn a_string_is_no_number() {
        assert!(serde_json::from_str::<Number>("\"NaN\"").is_err());
        assert!(serde_json::from_str::<Number>("\"1.0\"").is_err());
    }
}
