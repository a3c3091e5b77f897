"""The text that the tiny targets' tokenizer is trained on."""

TINY_TEXT = """\
The river rises in the hills and runs for ninety miles before it reaches the sea.
In spring the snow melts, the water is high, and the boats stay in the harbour.
A baker opens the shop at five, lights the oven, and weighs flour, salt and yeast.
Which of these numbers is larger: 17, 23, 105 or 98? The answer is 105.
If a train leaves at 8:40 and the journey takes 95 minutes, it arrives at 10:15.
def add(first, second):
    return first + second
for item in items:
    print(item, sum(values) / len(values))
{"name": "Ada", "age": 36, "city": "London", "tags": ["maths", "engines"]}
Write a short letter to a friend about the weather, the garden and the new house.
To make tea, boil the water, warm the pot, add the leaves, and wait for four minutes.
Can you explain what a prime number is? A prime number has exactly two divisors.
The teacher asked the children to read the story again and to say what they liked.
There are three things to remember: be kind, be clear, and check the result.
I think that this is the right way to do it, but we should ask someone else first.
Some people prefer the mountains, others the coast; both are beautiful in autumn.
List the steps, then explain each step in one sentence, and give an example.
"""
