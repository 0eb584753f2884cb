//! Exact fractions.

/// A fraction in lowest terms, its denominator positive. Every operation says `None` where the result
/// would not fit into 128 bits, and for a division by zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rational {
    numerator: i128,
    denominator: i128,
}

impl Rational {
    /// numerator/denominator.
    pub fn new(numerator: i128, denominator: i128) -> Option<Self> {
        let divisor =
            i128::try_from(gcd(numerator.unsigned_abs(), denominator.unsigned_abs())).ok();
        let divisor = divisor.filter(|divisor| *divisor != 0 && denominator != 0)?;
        let sign = denominator.signum();
        Some(Self {
            numerator: (numerator / divisor).checked_mul(sign)?,
            denominator: (denominator / divisor).checked_mul(sign)?,
        })
    }

    /// A whole number.
    pub fn whole(number: impl Into<i128>) -> Self {
        Self { numerator: number.into(), denominator: 1 }
    }

    /// −a.
    pub fn negate(self) -> Option<Self> {
        Some(Self { numerator: self.numerator.checked_neg()?, ..self })
    }

    /// a + b.
    pub fn plus(self, other: Self) -> Option<Self> {
        let left = self.numerator.checked_mul(other.denominator)?;
        let right = other.numerator.checked_mul(self.denominator)?;
        Self::new(left.checked_add(right)?, self.denominator.checked_mul(other.denominator)?)
    }

    /// a − b.
    pub fn minus(self, other: Self) -> Option<Self> {
        self.plus(other.negate()?)
    }

    /// a·b.
    pub fn times(self, other: Self) -> Option<Self> {
        Self::new(
            self.numerator.checked_mul(other.numerator)?,
            self.denominator.checked_mul(other.denominator)?,
        )
    }

    /// a / b.
    pub fn over(self, other: Self) -> Option<Self> {
        self.times(Self::new(other.denominator, other.numerator)?)
    }

    /// The whole number that it is, if it is one.
    pub fn as_whole(self) -> Option<i128> {
        (self.denominator == 1).then_some(self.numerator)
    }

    /// Reads `-3`, `2.50`, `7/4`: ASCII digits with at most one sign, point and slash.
    pub fn parse(text: &str) -> Option<Self> {
        match text.split_once('/') {
            Some((above, below)) => Self::decimal(above.trim())?.over(Self::decimal(below.trim())?),
            None => Self::decimal(text.trim()),
        }
    }

    fn decimal(text: &str) -> Option<Self> {
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let all = format!("{whole}{fraction}");
        if all.is_empty() || !all.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
        let number = Self::new(all.parse().ok()?, scale)?;
        if negative { number.negate() } else { Some(number) }
    }
}

fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
